"""Joint preferences, and trainers on them, that the tests of MADPO share."""

import torch
from datasets import Dataset
from transformers import TrainerCallback

from trl_multiagent import MADPOConfig, MADPOTrainer
from trl_multiagent.preferences.rows import make_row

from tiny import SHORT, tiny_team


def pairs(roles=("aux", "main"), number=12, chat=False) -> Dataset:
    """Texts of different lengths, so that batches are padded."""

    def prompt(role, k):
        text = f"Task {10**k % 997}, part {role}:"
        return [{"role": "user", "content": text}] if chat else text

    def row(k):
        chosen = {role: f"good {k}" + "!" * (1 + (k + n) % 4) for n, role in enumerate(roles)}
        rejected = {role: f"{n}bad" + "?" * ((2 * k + n) % 5) for n, role in enumerate(roles)}
        return make_row({role: prompt(role, k) for role in roles}, chosen, rejected, 1.0 + k, 0.5, item_id=k)

    return Dataset.from_list([row(k) for k in range(number)])


def pair_config(folder, config=MADPOConfig, **changes):
    return config(output_dir=str(folder), **{**SHORT, "max_steps": 3, "per_device_train_batch_size": 4, **changes})


def pair_trainer(folder, team=None, trainer=MADPOTrainer, **arguments):
    """A trainer on tiny agents; keyword arguments of the trainer and of its configuration, mixed."""
    team = tiny_team() if team is None else team
    names = ("train_dataset", "eval_dataset", "environment", "callbacks", "optimizers")
    own = {name: arguments.pop(name) for name in names if name in arguments}
    own.setdefault("train_dataset", pairs(team.roles))
    return trainer(team, pair_config(folder, **arguments), **own)


class Shift(TrainerCallback):
    """Changes the agents when the training begins, so that they differ from their reference policies."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        shift(model)


def shift(team):
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in team.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    return team

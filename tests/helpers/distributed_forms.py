"""
Two updates of every form of team, on completions that depend on nothing but the prompt. Run by
`test_distributed_forms.py`, under several launchers: `distributed_forms.py TEAMS OUTPUT ITEMS_PER_DEVICE`.
"""

import faulthandler
import json
import sys
import zlib
from pathlib import Path
from unittest import mock

import torch
from accelerate.utils import gather_object
from pairs import pair_config, pairs
from peft import LoraConfig
from transformers import TrainerCallback

from trl_multiagent import (
    AgentTeam,
    IACConfig,
    IACTrainer,
    JointRewardConfig,
    JointRewardTrainer,
    MAACConfig,
    MAACTrainer,
    MADPOTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
)
from trl_multiagent.rollout.tree import Samples, acting, root_nodes
from trl_multiagent.trainers.base.checkpoints import other_adapters

from process_group import end_process_group
from tiny import Workflow, byte_tokenizer, living_workflow, tiny_config, tiny_environment, tiny_items


EPISODES = {"branching": "episodes", "advantage_normalization": "role"}
CASES = {
    "full": ("full", {"beta": 0.1, "num_generations_eval": 2}),
    "shared": ("shared", {"beta": 0.1}),
    "lora": ("lora", {"beta": 0.1, "gradient_checkpointing": True}),
    "lora on two bases": ("lora on two bases", {}),
    "lora and whole modules": ("lora and whole modules", {"beta": 0.1, "gradient_checkpointing": True}),
    "mixed": ("mixed", {"beta": 0.1, "gradient_checkpointing": True}),
    "frozen partner": ("full", {"frozen_agents": ["aux"]}),
    "fresh adapters": (None, {"beta": 0.1}),
    "experts": ("experts", {}),
    "critics": ("full", {"gae_lambda": 0.95}),
    "adapters as critics": ("lora", {"critic_form": "adapter", "gradient_checkpointing": True}),
    "value heads": ("shared", {"critic_form": "head", "critic_value_head_hidden_dim": 8}),
    "central critic": ("full", {"num_iterations": 2}),
    "workflow": ("full", {"beta": 0.1, "num_iterations": 2, "num_generations": 2, "credit": "sibling"}),
    "workflow in episodes": ("lora", {**EPISODES, "gradient_checkpointing": True}),
    "workflow with critics": ("shared", {"critic_form": "head", "num_generations": 2, "gae_lambda": 0.95}),
}


WITH_CRITICS = ("critics", "adapters as critics", "value heads", "workflow with critics")
ALGORITHMS = {**dict.fromkeys(WITH_CRITICS, (IACTrainer, IACConfig)), "central critic": (MAACTrainer, MAACConfig)}

# Where a step of each of two processes has several micro-batches. In one process, which has all items, every case has
ACCUMULATED = ["full", "lora", "critics"]

# Whose answers are compared. Under ZeRO-3 all agents answer, whose weights have to be gathered
SAMPLED = ["full", "lora on two bases", "lora", "shared"]

# Two updates with AdamW, computed in bfloat16
BFLOAT16 = {"bfloat16": "full", "lora in bfloat16": "lora"}

# Three updates of MADPO
PREFERENCES = {
    "preferences": ("full", {"loss_type": ["sigmoid", "sft"]}),
    "preferences, frozen adapter": ("lora", {"frozen_agents": ["aux"], "gradient_checkpointing": True}),
    # In the evaluation after it, the processes sample completions of different lengths
    "preferences, other models": ("heterogeneous", {"max_completion_length": 128}),
}
REWARD_MODEL = "preferences for a reward model"


class Deterministic:
    whole_references = ()  # the agents whose reference is whole in this process when it is copied

    def _set_up_reference(self, reference, *args):
        if reference is not None:
            models = reference.policies.items()
            self.whole_references = [x for x, model in models if all(p.numel() for p in model.parameters())]
        super()._set_up_reference(reference, *args)

    def _sample(self, nodes, num_generations):
        if self.args.gradient_checkpointing:
            super()._sample(nodes, num_generations)  # the collective work of generating, for its side effects
        return {role: self._sample_agent(role, acting(role, nodes), num_generations) for role in self.team.roles}

    def _sample_agent(self, role, nodes, num_generations):
        samples = []
        for node, ids in zip(nodes, (prompt.ids for prompt in self.sampler.prompts(role, nodes)), strict=True):
            generator = torch.Generator().manual_seed(zlib.crc32(bytes(ids)) + (node.episode or 0))
            lengths = torch.randint(2, 9, (4,), generator=generator).tolist()[:num_generations]
            completions = [torch.randint(33, 122, (length,), generator=generator).tolist() for length in lengths]
            samples.append(Samples(ids, completions, self.team.tokenizers[role].batch_decode(completions)))
        return samples


def update(teams: Path, output: Path, items_per_device: int, case: str) -> dict:
    form, settings = CASES[case]
    trainer_class, config_class = ALGORITHMS.get(case, (MAGRPOTrainer, MAGRPOConfig))
    if case in ALGORITHMS:
        settings = {"num_generations": 4, "discount": 0.7, "critic_learning_rate": 0.1, **settings}
    is_workflow = case.startswith("workflow")
    common = {"num_turns": 3 if is_workflow else 2, "early_termination_threshold": 0.12, "max_steps": 2}
    common |= {
        "optim": "sgd",
        "learning_rate": 0.3,
        "max_grad_norm": 1.0,
        "per_device_eval_batch_size": 2,
        "logging_first_step": True,
    }
    common["per_device_train_batch_size"] = 20 if case in ACCUMULATED else 40
    common["logging_steps"] = 1 if case != "full" else 5  # not the last step
    # Before the team, which ZeRO-3 loads in parts
    args = tiny_config(output / case, config_class, items_per_device=items_per_device, **common, **settings)
    if form is None:
        torch.manual_seed(args.process_index)  # what a process drew before does not matter
        torch.rand(1 + args.process_index)
        config = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", modules_to_save=["norm", "embed_tokens"])
        team = AgentTeam.from_pretrained(str(teams / "full/agents/aux"), ["aux", "main"], peft_config=config, seed=7)
    else:
        team = AgentTeam.from_pretrained(str(teams / form))
    trainer_class = type("DeterministicTrainer", (Deterministic, trainer_class), {})
    environment = Workflow(shared="credit" in settings) if is_workflow else tiny_environment(team.roles)
    environment = living_workflow() if case == "workflow in episodes" else environment
    trainer = trainer_class(team, environment, args, tiny_items(12))
    if case in ALGORITHMS:
        torch.manual_seed(5)
        for head in team.critics.heads.values():  # or the critics' models would have no gradient in the first step
            head[-1].weight.data.normal_(std=0.3)
    results = []
    if form == "full":  # which leaves no trace. Some processes have fewer items, or none
        trainer.predict(tiny_items(1))
        results.append(trainer.evaluate(tiny_items(3))["eval_reward"])
    results += [trainer.train().training_loss for _ in range(2 if case == "full" else 1)]
    shares = [x["turn_1/early_terminated"] for x in trainer.state.log_history if "reward" in x]
    acting_roles = gather_object([[role for role in team.roles if any(acting(role, x) for x in trainer._turns)]])
    report = {"early_terminated": shares, "results": results, "acting": acting_roles}
    if case in [*SAMPLED, "experts"]:
        report |= sampled(trainer)
    return {**save(trainer, output / case), **report}


def sampled(trainer) -> dict:
    """What the agents answer without randomness, and the agents that are whole in this process while each does."""
    team, generator, held = trainer.team, trainer.generator, {}

    def watch(model, group, roles, turn):
        needed = {x: {*team.policies[x].parameters()} - {*other_adapters(team.policies[x], [x])} for x in team.roles}
        whole = [x for x in team.roles if all(p.numel() for p in needed[x])]
        held.update(dict.fromkeys(roles, whole))
        return sample(model, group, roles, turn)

    sample = generator.sample
    with mock.patch.object(generator, "sample", watch), mock.patch.dict(generator.arguments, do_sample=False):
        samples = trainer.sampler(root_nodes(tiny_items(2), trainer.environment), 1)
    answers = {role: [x.completion_ids for x in nodes] for role, nodes in samples.items()}
    return {"answers": answers, "held": held, "whole_references": trainer.whole_references}


def update_in_bfloat16(teams: Path, output: Path, items_per_device: int, case: str) -> dict:
    settings = {"items_per_device": items_per_device, "bf16": True, "learning_rate": 5e-6, "max_steps": 2}
    args = tiny_config(output / case, per_device_train_batch_size=20, weight_decay=0.0, **settings)
    team = AgentTeam.from_pretrained(str(teams / BFLOAT16[case]), base_dtype="bfloat16")
    trainer_class = type("DeterministicTrainer", (Deterministic, MAGRPOTrainer), {})
    trainer = trainer_class(team, tiny_environment(team.roles), args, tiny_items(12))
    trainer.add_callback(KeepUpdate(output / case))
    trainer.train()
    return save(trainer, output / case)


class KeepUpdate(TrainerCallback):
    """Writes what a training adds to the weights that the optimizer changes."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.start = trained_weights(model, args)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        end = trained_weights(model, args)
        if args.process_index == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save({name: x - self.start[name] for name, x in end.items()}, self.folder / "update.pt")


def trained_weights(model, args) -> dict[str, torch.Tensor]:
    """The float32 weights that the optimizer changes."""
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    if args.deepspeed_plugin is not None:
        from deepspeed.utils import safe_get_full_fp32_param

        trained = {name: safe_get_full_fp32_param(x) for name, x in trained.items()}
    assert {x.dtype for x in trained.values()} == {torch.float32}
    return {name: x.detach().clone() for name, x in trained.items()}


def update_on_preferences(teams: Path, output: Path, pairs_per_device: int, case: str) -> dict:
    form, settings = PREFERENCES[case]
    settings = {"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 1.0, "max_completion_length": 8, **settings}
    args = pair_config(output / case, per_device_train_batch_size=pairs_per_device, **settings)
    team = AgentTeam.from_pretrained(str(teams / form))
    trainer = MADPOTrainer(team, args, pairs(team.roles), tiny_items(2), tiny_environment(team.roles))
    for _ in range(2 if case == "preferences" else 1):
        trainer.train()
    return {**save(trainer, output / case), "reward": trainer.evaluate()["eval_reward"]}


def update_reward_model(teams: Path, output: Path, pairs_per_device: int) -> dict:
    settings = {"per_device_train_batch_size": pairs_per_device, "optim": "sgd", "learning_rate": 0.3}
    args = pair_config(output / REWARD_MODEL, JointRewardConfig, **settings)
    model = str(teams / "reward_model")
    trainer = JointRewardTrainer(model, args, pairs(), pairs(number=4), processing_class=byte_tokenizer())
    trainer.evaluate()  # which leaves no trace
    trainer.train()
    report = save(trainer, output / REWARD_MODEL)
    trainer.save_model(str(output / REWARD_MODEL / "agents" / "reward_model"))
    return report


def save(trainer, folder: Path) -> dict:
    trainer.save_model(str(folder))
    accelerator = trainer.accelerator
    plugin = accelerator.state.deepspeed_plugin
    return {
        "distributed_type": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "zero_stage": plugin.zero_stage if plugin is not None else None,
        "offload": plugin is not None and "offload_optimizer" in plugin.deepspeed_config["zero_optimization"],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(600, exit=True)  # processes that wait for each other say where
    teams, output, items_per_device = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    report = {}
    for case in sys.argv[4:] or (*CASES, *BFLOAT16, *PREFERENCES, REWARD_MODEL):
        if case == REWARD_MODEL:
            report[case] = update_reward_model(teams, output, items_per_device)
            continue
        update_case = update_on_preferences if case in PREFERENCES else update
        update_case = update_in_bfloat16 if case in BFLOAT16 else update_case
        report[case] = update_case(teams, output, items_per_device, case)
    end_process_group()
    (output / "report.json").write_text(json.dumps(report))

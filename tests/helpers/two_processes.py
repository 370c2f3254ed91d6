"""
Three updates on completions that depend on nothing but the prompt, and two passes through preference pairs. Run by
`test_two_processes.py`, also under a launcher.
"""

import contextlib
import sys
import zlib
from unittest import mock

import torch
from pairs import pair_config, pair_trainer, pairs

from trl_multiagent import JointRewardConfig, JointRewardTrainer, MAGRPOTrainer
from trl_multiagent.report import terminal
from trl_multiagent.rollout.tree import Samples
from trl_multiagent.trainers.base import metrics

from process_group import end_process_group
from tiny import byte_tokenizer, tiny_classifier, tiny_items, tiny_trainer


COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier")
COLLECTIVES += ("reduce", "gather", "gather_object", "broadcast_object_list", "monitored_barrier")


class Deterministic(MAGRPOTrainer):
    def compute_loss(self, *args, **kwargs):
        self.calls.append("micro-batch")
        return super().compute_loss(*args, **kwargs)

    def _sample(self, nodes, num_generations):
        return {role: self._sample_agent(role, nodes) for role in self.team.roles}

    def _sample_agent(self, role, nodes):
        samples = []
        for prompt_ids in (prompt.ids for prompt in self.sampler.prompts(role, nodes)):
            generator = torch.Generator().manual_seed(zlib.crc32(bytes(prompt_ids)))
            lengths = torch.randint(2, 9, (4,), generator=generator).tolist()
            ids = [torch.randint(33, 122, (length,), generator=generator).tolist() for length in lengths]
            samples.append(Samples(prompt_ids, ids, self.team.tokenizers[role].batch_decode(ids)))
        return samples


class Cramped(Deterministic):
    """The last process has memory for three rows in a forward."""

    def agent_loss(self, role, outputs, rows):
        if self.accelerator.process_index == self.accelerator.num_processes - 1 and len(rows) > 3:
            raise torch.OutOfMemoryError("no room")
        return super().agent_loss(role, outputs, rows)


def recorded(name: str, calls: list[str]):
    """Makes a function of `torch.distributed` note that it is called."""
    function = getattr(torch.distributed, name)

    def record(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    return record


def update(output: str, items_per_device: int, micro_batch: int | str, beta: float, trainer=Deterministic):
    settings = {"items_per_device": items_per_device, "per_device_train_batch_size": micro_batch, "beta": beta}
    settings |= {"num_turns": 2, "early_termination_threshold": 0.12, "max_steps": 3, "optim": "sgd"}
    settings |= {"learning_rate": 0.5, "log_completions": True, "num_completions_to_print": 1}
    settings |= {"logging_steps": 2 if beta else 1}
    label = "cramped" if trainer is Cramped else beta
    trainer = tiny_trainer(f"{output}/{label}", trainer=trainer, train_dataset=tiny_items(12), **settings)
    trainer.calls = []  # of collectives, DDP's own of gradients not included, and the beginnings of micro-batches
    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(torch.distributed, name, recorded(name, trainer.calls)))
        gather = mock.Mock(wraps=metrics.gather_object)
        for module in (metrics, terminal):
            stack.enter_context(mock.patch.object(module, "gather_object", gather))
        trainer.train()
    if trainer.accelerator.is_main_process:
        assert trainer.accelerator.num_processes == 1 or not trainer.model_wrapped.find_unused_parameters
        log = [entry for entry in trainer.state.log_history if "reward" in entry]
        result = {"weights": trainer.team.state_dict(), "log": log, "processes": trainer.accelerator.num_processes}
        result |= {"gathers": gather.call_count, "calls": trainer.calls, "rows": trainer.args.rows_per_forward}
        torch.save(result, f"{output}/{label}.pt")


def update_on_samples(output: str, items_per_device: int):
    """Two updates on what the agents sample, and an evaluation whose last batch is not full."""
    settings = {"items_per_device": items_per_device, "per_device_train_batch_size": 64, "optim": "sgd"}
    settings |= {"max_steps": 2, "num_turns": 2, "learning_rate": 0.5, "trace_steps": 1, "temperature": 1.0}
    items = {"train_dataset": tiny_items(12), "eval_dataset": tiny_items(3), "num_generations_eval": 3}
    trainer = tiny_trainer(f"{output}/sampled", **items, per_device_eval_batch_size=items_per_device, **settings)
    trainer.train()
    evaluations = [trainer.evaluate() for _ in range(2)]
    if trainer.accelerator.is_main_process:
        result = {"weights": trainer.team.state_dict(), "evaluations": evaluations}
        torch.save(result, f"{output}/sampled.pt")


def update_on_pairs(output: str, name: str, number: int, batch_size: int):
    """The last batch of a pass through the pairs is not full: accelerate repeats pairs for the second process."""
    rows = pairs(number=number)
    settings = {"max_steps": -1, "num_train_epochs": 2, "optim": "sgd", "learning_rate": 0.1}
    settings |= {"per_device_train_batch_size": batch_size, "per_device_eval_batch_size": batch_size}
    if name == "madpo":
        losses = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
        trainer = pair_trainer(f"{output}/pairs", train_dataset=rows, eval_dataset=rows, **losses, **settings)
    else:
        settings |= {"center_rewards_coefficient": 0.1}
        config = pair_config(f"{output}/pairs", JointRewardConfig, **settings)
        trainer = JointRewardTrainer(tiny_classifier(), config, rows, rows, processing_class=byte_tokenizer())
    trainer.train()
    trainer.evaluate()
    if trainer.accelerator.is_main_process:
        result = {"weights": trainer.model.state_dict(), "log": trainer.state.log_history}
        torch.save(result, f"{output}/{name}_{number}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for beta in (0.0, 0.1):
        update(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), beta)
    update(sys.argv[1], int(sys.argv[2]), "auto", 0.0, Cramped)
    update_on_samples(sys.argv[1], int(sys.argv[2]))
    for number in (9, 11):  # the last batch has one pair, or three
        for name in ("madpo", "reward"):
            update_on_pairs(sys.argv[1], name, number, batch_size=int(sys.argv[2]))
    end_process_group()

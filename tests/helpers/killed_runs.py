"""Runs that kill themselves, and runs that resume them. Run by `test_checkpoints.py`: `killed_runs.py PLAN`."""

import io
import json
import os
import random
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import torch

from trl_multiagent import FunctionEnvironment
from trl_multiagent.jobs.signals import end_on_signal
from trl_multiagent.trainers.base.checkpoints import read_checkpoint

from process_group import end_process_group
from tiny import count_reward, feedback, living_workflow, team_of, tiny_items, tiny_trainer


class MoodyEnvironment(FunctionEnvironment):
    """An environment with a state: its rewards depend on random numbers of its own, and on how many it gave."""

    def __init__(self, roles=("aux", "main")):
        super().__init__({role: "Task {x}, part " + role + ":" for role in roles}, count_reward, transition=feedback)
        self.random = random.Random(5)
        self.calls = 0

    def score(self, items, joint_actions, histories):
        self.calls += 1
        outcomes = super().score(items, joint_actions, histories)
        for outcome in outcomes:
            outcome.reward += self.random.random() + self.calls / 100
        return outcomes

    def state_dict(self):
        return {"random": self.random.getstate(), "calls": self.calls}

    def load_state_dict(self, state):
        self.random.setstate(state["random"])
        self.calls = state["calls"]


SETTINGS = {
    # An epoch is 3 steps, with two processes 2. Saves fall between logs, in the middle of epochs and at their ends
    "plain": {"logging_steps": 3, "save_steps": 2, "save_total_limit": 1, "lr_scheduler_type": "linear"},
    "tree": {
        **{"num_turns": 2, "num_generations": 2, "early_termination_threshold": 0.12},
        **{"beta": 0.05, "eval_strategy": "epoch", "eval_dataset": tiny_items(3), "eval_on_start": True},
        "save_steps": 3,
        **{"logging_strategy": "epoch", "log_completions": True, "num_completions_to_print": 1, "trace_steps": 2},
    },
    "chain": {
        **{"num_turns": 2, "handoff": "random", "environment": MoodyEnvironment(), "logging_steps": 5},
        **{"eval_strategy": "steps", "eval_steps": 4, "eval_dataset": tiny_items(3), "save_steps": 4},
        **{"load_best_model_at_end": True, "metric_for_best_model": "reward", "save_total_limit": 2},
    },
    "lora": {"team": "lora", "beta": 0.05, "gradient_checkpointing": True, "logging_steps": 3, "save_steps": 2},
    "workflow": {
        **{"environment": living_workflow(), "num_turns": 3, "branching": "episodes", "save_steps": 3},
        **{"num_generations": 2, "advantage_normalization": "role", "logging_steps": 2, "eval_dataset": tiny_items(3)},
        "num_iterations": 2,
        **{"eval_strategy": "steps", "eval_steps": 4, "log_completions": True, "num_completions_to_print": 1},
    },
    "ahead": {
        **{"rollouts_ahead": 1, "num_turns": 2, "num_generations": 2, "environment": MoodyEnvironment()},
        **{"per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 3, "eval_dataset": tiny_items(3)},
        **{"save_steps": 2, "logging_steps": 3},
    },
    "two_processes": {
        **{"max_steps": 5, "train_dataset": tiny_items(8), "beta": 0.05},
        **{"logging_steps": 3, "save_steps": 2, "save_total_limit": 1},
    },
}


def train(
    folder, settings, resume=False, kill=None, killed_rank=0, number=signal.SIGKILL, result=None, max_steps=8
) -> None:
    """
    Args:
        kill (`tuple[str, int]`, *optional*): Instant at which the process `killed_rank` dies, and at which time it
            comes.
        number (`int`, *optional*): The signal that it sends itself then.
        result (`str`, *optional*): File for what the run ended with.
    """
    common = {"max_steps": max_steps, "train_dataset": tiny_items(6), "save_strategy": "steps", "learning_rate": 0.01}
    arguments = {**common, **SETTINGS[settings]}
    team = team_of(arguments.pop("team", "full"), num_hidden_layers=1)
    trainer = tiny_trainer(folder, team, **arguments)
    if kill is not None and trainer.accelerator.process_index == killed_rank:
        instant, time = kill
        kill_at = {"score": partial(kill_at_score, signal=number), "write": kill_at_write, "part": kill_at_part}
        kill_at[instant](trainer, time)
    with end_on_signal("run"):
        output = trainer.train(resume_from_checkpoint=resume)
    if result is not None:
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if trainer.accelerator.is_main_process:
            report = {
                "weights": state,
                "log": trainer.state.log_history,
                "env_step": trainer.env_step,
                "num_tokens": trainer.state.num_input_tokens_seen,
                "train_loss": output.training_loss,
                "best": trainer.state.best_model_checkpoint,
                "distribution": trainer.accelerator.distributed_type.value,
                "processes": trainer.accelerator.num_processes,
            }
            torch.save(report, result)


def die(signal=signal.SIGKILL):
    os.kill(os.getpid(), signal)


def kill_at_score(trainer, number: int, signal=signal.SIGKILL) -> None:
    """Gets a signal when the environment is asked for rewards for the n-th time."""
    score, calls = trainer.environment.score, []

    def dying_score(*args):
        calls.append(1)
        if len(calls) == number:
            die(signal)
        return score(*args)

    trainer.environment.score = dying_score


def kill_at_part(trainer, number: int) -> None:
    """Dies when this process has written half of its own part of the n-th checkpoint."""
    process_state, calls = trainer._process_state, []

    def dying_process_state():
        calls.append(1)
        if len(calls) == number:
            die()
        return process_state()

    trainer._process_state = dying_process_state


def kill_at_write(trainer, number: int) -> None:
    """
    Dies before the n-th operation on the files of a checkpoint, or halfway through it where that is `torch.save`.
    With the number 0 it records the operations, and whatever counts as a checkpoint before one of them but is none.
    """
    folder = Path(trainer.args.output_dir)
    operations, incomplete = [], []
    looking, lock = threading.local(), threading.Lock()  # checksums are computed in several threads
    torch_save = torch.save

    def operate(name, path):
        with lock:
            operations.append(f"{name} {path}")
            done = len(operations)
        if number == 0:
            looking.now = True
            for checkpoint in folder.glob("checkpoint-*"):
                try:
                    read_checkpoint(checkpoint)
                except ValueError as error:
                    incomplete.append(f"{name} {path}: {error}")
            looking.now = False
        return done == number

    def saving(state, path, *args, **kwargs):
        if operate("torch.save", path):
            buffer = io.BytesIO()
            torch_save(state, buffer)
            Path(path).write_bytes(buffer.getvalue()[: buffer.tell() // 2])
            die()
        torch_save(state, path, *args, **kwargs)

    def audit(event, arguments):
        if getattr(looking, "now", False):
            return
        in_checkpoint = event in ("open", "os.mkdir", "os.rename") and "checkpoint-" in str(arguments[0])
        removed = event in ("os.remove", "os.rmdir") and arguments[1] != -1  # how `shutil.rmtree` works
        if (in_checkpoint or removed) and operate(event, arguments[0]):
            die()

    torch.save = saving
    sys.addaudithook(audit)
    if number == 0:
        finalize = trainer._finalize_training

        def recording(*args):
            Path(folder, "operations.json").write_text(json.dumps([operations, incomplete]))
            return finalize(*args)

        trainer._finalize_training = recording


if __name__ == "__main__":
    try:
        train(**json.loads(sys.argv[1]))
    except SystemExit:  # of all processes
        end_process_group()
        raise
    end_process_group()

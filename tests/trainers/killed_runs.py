"""
Runs that kill themselves, and runs that resume them. Every run has processes of its own, forked so that the libraries
are imported once. Run by `test_checkpoints.py`, which says what to run.
"""

import io
import json
import os
import random
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).parents[1]))
from trl_multiagent import FunctionEnvironment
from trl_multiagent.trainers.checkpoints import read_checkpoint

from tiny import count_reward, feedback, team_of, tiny_items, tiny_trainer


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
    # An epoch is 3 steps. Saves fall between logs, in the middle of epochs and at their ends
    "plain": {"logging_steps": 3, "save_steps": 2, "save_total_limit": 1, "lr_scheduler_type": "linear"},
    "tree": {
        "num_turns": 2,
        "num_generations": 2,
        "early_termination_threshold": 0.12,
        "beta": 0.05,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "eval_strategy": "epoch",
        "eval_dataset": tiny_items(3),
        "eval_on_start": True,
        "logging_strategy": "epoch",
        "save_steps": 3,
        "log_completions": True,
        "num_completions_to_print": 1,
    },
    "chain": {
        "num_turns": 2,
        "handoff": "random",
        "environment": MoodyEnvironment(),
        "logging_steps": 5,
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "eval_dataset": tiny_items(3),
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
        "save_total_limit": 2,
    },
    "lora": {
        "team": "lora",
        "beta": 0.05,
        "gradient_checkpointing": True,
        "logging_steps": 3,
        "save_steps": 2,
    },
    "two_processes": {
        "max_steps": 5,
        "train_dataset": tiny_items(12),
        "beta": 0.05,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "logging_steps": 3,
        "save_steps": 2,
        "save_total_limit": 1,
    },
}


def train(folder: str, settings: str, resume: bool, kill: tuple[str, int] | None, result: str | None) -> None:
    torch.set_num_threads(1)
    common = {
        "max_steps": 8,
        "train_dataset": tiny_items(6),
        "save_strategy": "steps",
        "learning_rate": 0.01,
    }
    arguments = {**common, **SETTINGS[settings]}
    trainer = tiny_trainer(folder, team=team_of(arguments.pop("team", "full")), **arguments)
    if kill is not None:
        instant, number = kill
        kill_at = {"score": kill_at_score, "write": kill_at_write, "part": kill_at_part, "end": kill_at_end}
        kill_at[instant](trainer, number)
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


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_score(trainer, number: int) -> None:
    """Dies when the environment is asked for rewards for the n-th time."""
    score, calls = trainer.environment.score, []

    def dying_score(*args):
        calls.append(1)
        if len(calls) == number:
            die()
        return score(*args)

    trainer.environment.score = dying_score


def kill_at_end(trainer, number: int) -> None:
    """Dies after the last checkpoint, before the end of training is recorded."""
    trainer._finalize_training = lambda *args: die()


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
    operations, incomplete, looking = [], [], []
    torch_save = torch.save

    def operate(name, path):
        operations.append(f"{name} {path}")
        if number == 0:
            looking.append(True)
            for checkpoint in folder.glob("checkpoint-*"):
                try:
                    read_checkpoint(checkpoint)
                except ValueError as error:
                    incomplete.append(f"{operations[-1]}: {error}")
            looking.clear()
        return len(operations) == number

    def saving(state, path, *args, **kwargs):
        if operate("torch.save", path):
            buffer = io.BytesIO()
            torch_save(state, buffer)
            Path(path).write_bytes(buffer.getvalue()[: buffer.tell() // 2])
            die()
        torch_save(state, path, *args, **kwargs)

    def audit(event, arguments):
        if looking:
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


def run(folder, settings, resume=False, kill=None, result=None, processes=1, zero=None, killed_rank=0) -> list[int]:
    """Runs to the end, or to the death of a process, and returns the exit codes."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = {}
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            log = os.open(Path(folder) / f"output_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if processes > 1:
                names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
                names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in names.items()})
            if zero is not None:
                os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
                os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = zero
            elif processes > 1:
                os.environ["ACCELERATE_USE_CPU"] = "true"
            try:
                train(folder, settings, resume, kill if rank == killed_rank else None, result)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children[pid] = rank
    codes = [0] * processes
    while children:
        pid, status = os.wait()
        codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        if status != 0:  # as a launcher does
            for other in children:
                os.kill(other, signal.SIGKILL)
    return codes


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)

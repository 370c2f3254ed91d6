"""
What both systems of `steps.py` are given: items, prompts, joint reward; and how their steps are taken and
measured.

Imports nothing of either system, so that the peer's process holds no more than the peer needs.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import GenerationMixin


ROLES = ("aux", "main")
# Arguments of trainers that are made on TRL's: they sample from the model's own distribution, compute in float32, and
# write nothing
ARGUMENTS = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0},
    **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False},
    **{"lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none"},
}


def step_arguments(settings: dict) -> dict:
    """
    The arguments that ours and TRL's trainer share in `steps.py`. The optimizer is the peer's: torch's AdamW, a
    constant rate, no clipping.
    """
    return {
        **ARGUMENTS,
        **{"seed": settings["seed"], "max_steps": len(settings["items"]) // settings["items_per_step"]},
        **{"num_generations": settings["num_generations"], "max_completion_length": settings["max_new_tokens"]},
        **{"per_device_train_batch_size": settings["rows_per_forward"], "shuffle_dataset": False},
        **{"learning_rate": settings["learning_rate"], "weight_decay": 0.01, "max_grad_norm": 0.0},
    }


def text_reward(item: dict, joint_action: dict[str, str]) -> float:
    """A joint reward that costs nothing and is hardly ever the same for two different texts."""
    words = " ".join(joint_action.values()).split()
    return -abs(len(words) - 20) / 20 - 0.001 * sum(map(len, words))


def load_reward(name: str) -> Callable[[list[dict], list[dict[str, str]]], list[float]]:
    """
    The joint reward of a batch of joint actions, `(items, joint_actions) -> rewards`.

    `"code"` runs the demo's tests in the sandbox of `trl_multiagent`; `"text"` is [`text_reward`].
    """
    if name == "text":
        return lambda items, joint_actions: list(map(text_reward, items, joint_actions))

    from trl_multiagent.tasks.code_generation import CodeGenerationEnvironment

    environment = CodeGenerationEnvironment(collaboration="static")  # CoMLRL does not watch whether aux is called
    return lambda items, joint_actions: [
        outcome.reward for outcome in environment.score(items, joint_actions, [()] * len(items))
    ]


class Steps:
    """
    Takes one training step per line on standard input, and answers with one JSON line about it on standard output.

    A step lasts from the line that asks for it until [`~Steps.done`]; all that the system does in between counts.
    """

    def __init__(self):
        self.replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever the system prints goes to standard error
        self.phases = {}
        self.work = dict  # returns what the last step could not do without, if the system tells
        self.counts = {"generate_calls": 0, "optimizer_steps": 0}
        GenerationMixin.generate = self._counted(GenerationMixin.generate)
        register_optimizer_step_post_hook(self._count_optimizer_step)

    def _counted(self, generate: Callable) -> Callable:
        def wrapper(*args, **kwargs):
            self.counts["generate_calls"] += 1
            return generate(*args, **kwargs)

        return wrapper

    def _count_optimizer_step(self, *_) -> None:
        self.counts["optimizer_steps"] += 1

    def timed(self, phase: str, function: Callable) -> Callable:
        """The function, with the time that it takes added to a phase of the step."""

        def wrapper(*args, **kwargs):
            start = clocks()
            result = function(*args, **kwargs)
            self.phases[phase] = self.phases.get(phase, 0) + clocks() - start
            return result

        return wrapper

    def ready(self) -> None:
        """Says that everything is loaded."""
        self.reply(memory_mb=peak_memory())

    def wait(self) -> None:
        """Sleeps until the next step is asked for."""
        if not sys.stdin.readline():
            sys.exit("The benchmark has gone.")
        self.phases = {"generate": np.zeros(2), "reward": np.zeros(2)}
        self.counts = dict.fromkeys(self.counts, 0)
        self.start = clocks()

    def callback(self, rewards: list[float]):
        """
        A callback of `Trainer`: a step ends with its log, so that the metrics are part of it. `rewards`: those of the
        step.
        """
        from transformers import TrainerCallback

        class OneStepAtATime(TrainerCallback):
            def on_train_begin(callback, args, state, control, **kwargs):
                self.wait()

            def on_log(callback, args, state, control, logs, **kwargs):
                if "loss" in logs:  # not the summary at the end
                    self.done(rewards)
                    rewards.clear()
                    if state.global_step < state.max_steps:
                        self.wait()

        return OneStepAtATime()

    def done(self, rewards: list[float]) -> None:
        """
        Ends a step.

        Args:
            rewards (`list[float]`): The reward of every joint action of the step.
        """
        step = clocks() - self.start
        phases = {"step": step, **self.phases, "update": step - self.phases["generate"] - self.phases["reward"]}
        self.reply(
            seconds={phase: times[0] for phase, times in phases.items()},
            cpu_seconds={phase: times[1] for phase, times in phases.items()},
            **self.counts,
            work=self.work(),
            env_steps=len(rewards),
            reward=sum(rewards) / len(rewards),
            peak_memory_mb=peak_memory(),
        )

    def reply(self, **values) -> None:
        self.replies.write(json.dumps(values) + "\n")
        self.replies.flush()


def clocks() -> np.ndarray:
    """Wall time and processor time of this process, in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def peak_memory() -> float:
    """Largest resident size of this program since its start, in MB."""
    # Not getrusage: its maximum begins with the size of the process that started this one
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024

"""
Runs in which the processes differ, or one of them fails. Run under a launcher by `test_together.py`.

Arguments: a folder, in which every process writes what it saw to `<process>.pt`; a model; whether process 1 dies by an
error that nobody catches ("exit", as `sys.exit` in a reward is one) or is killed ("killed") at the end.
"""

import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from trl_multiagent import AgentTeam, FunctionEnvironment, MAGRPOTrainer

from tiny import EVALUATED, count_reward, feedback, team_of, tiny_environment, tiny_items, tiny_trainer


FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])


def trainer(**arguments):
    arguments = {"num_turns": 2, "num_generations": 2, "per_device_train_batch_size": 4, **arguments}
    arguments.setdefault("per_device_eval_batch_size", 2)  # both processes have items to evaluate
    team = arguments.pop("team", None) or team_of("full", num_hidden_layers=1)
    return tiny_trainer(FOLDER / "run", team, **arguments)


# Processes whose trees differ


def one_ends_at_once(completions, **columns):
    """Process 0 ends every tree at its first turn; process 1 plays them all to the end."""
    return [reward + (1000.0 if RANK == 0 else 0.0) for reward in count_reward(completions)]


def one_learns_nothing(completions, **columns):
    """All rewards of process 0 are equal: it has rows of padding only."""
    return [0.0 if RANK == 0 else reward for reward in count_reward(completions)]


def short(role):
    """Prompts of which process 0 has one token only."""
    return lambda item: "x" if RANK == 0 else f"Task {item['x']}, part {role}:"


def differing(reward, **arguments):
    roles = ("aux", "main")
    environment = FunctionEnvironment({role: short(role) for role in roles}, reward, transition=feedback)
    settings = {"eval_dataset": tiny_items(3), **EVALUATED, "max_steps": 2}
    settings |= {"early_termination_threshold": 500.0, "generation_token_budget": 200}
    settings |= {"optim": "sgd", "learning_rate": 0.1}
    run = trainer(environment=environment, **settings, **arguments)
    run.train()
    episodes = run.collaborate([dict(item) for item in tiny_items(3)] if RANK == 0 else [])
    return {
        "weights": run.accelerator.get_state_dict(run.model_wrapped),
        "log": [entry for entry in run.state.log_history if "loss" in entry or "eval_reward" in entry],
        "episodes": len(episodes),
        "distribution": (run.accelerator.distributed_type.value, run.accelerator.num_processes),
    }


# One process fails


class NoNumber(MAGRPOTrainer):
    def agent_loss(self, role, outputs, rows):
        return super().agent_loss(role, outputs, rows) * (float("nan") if RANK == 1 else 1.0)


class NoMemory(MAGRPOTrainer):
    """Fails inside the generation of the last agent, when another process is still generating."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        sample = self.generator.sample

        def fail(model, group, roles, turn):
            if RANK == 1 and "main" in roles and turn.nodes["main"][0].history:
                raise torch.OutOfMemoryError("no room for 7 tokens")
            return sample(model, group, roles, turn)

        self.generator.sample = fail


def broken_reward(completions, **columns):
    if RANK == 1:
        raise ValueError("the judge is ill")
    return count_reward(completions)


def exiting_reward(completions, **columns):
    if RANK == 1:
        sys.exit(0)
    return count_reward(completions)


def broken_everywhere(completions, **columns):
    raise KeyError(f"column of {RANK}")


class BadMetrics(FunctionEnvironment):
    def metrics(self):
        return {"calls": "many" if RANK == 1 else 7}


def broken_transition(item, history):
    if RANK == 1 and len(history) == 2:
        raise LookupError("no third turn")
    return feedback(item, history)


def killed(completions, **columns):
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return count_reward(completions)


def failing(evaluate=False, **arguments):
    run = trainer(**arguments)
    try:
        run.evaluate() if evaluate else run.train()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def refused(**arguments):
    try:
        trainer(**arguments)
    except ValueError as error:
        return str(error)


def failures():
    environment = tiny_environment()
    environment.transition = broken_transition
    yield "transition", failing(environment=environment, num_turns=3)
    yield "generation", failing(trainer=NoMemory)
    yield "nan loss", failing(trainer=NoNumber)
    if PartialState().distributed_type == DistributedType.DEEPSPEED:
        yield "gather", refused(ds3_gather_for_generation=False)
        return
    judged = tiny_environment(reward=broken_reward)
    yield "evaluation", failing(environment=judged, eval_dataset=tiny_items(4), evaluate=True)
    yield "metrics", failing(environment=BadMetrics(tiny_environment().templates, count_reward, transition=feedback))
    yield "everywhere", failing(environment=tiny_environment(reward=broken_everywhere))
    yield "even batches", refused(accelerator_config={"even_batches": False})
    yield "split batches", refused(accelerator_config={"split_batches": True})


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(600, exit=True)  # processes that wait for each other say where
    seen = {
        "ends": differing(one_ends_at_once, num_turns=3),
        # The first trainer has told transformers of ZeRO-3, so this team is loaded in parts
        "learns nothing": differing(
            one_learns_nothing, team=AgentTeam.from_pretrained(sys.argv[2], ["aux", "main"]), beta=0.1
        ),
        **dict(failures()),
    }
    torch.save(seen, FOLDER / f"{RANK}.pt")
    reward = {"exit": exiting_reward, "killed": killed}[sys.argv[3]]
    last = trainer(environment=tiny_environment(reward=reward), num_turns=1)
    try:
        last.train()
    except Exception:
        traceback.print_exc()  # the launcher shows the error of one process only
        if sys.argv[3] == "killed":
            signal.pause()  # until the launcher ends this process: it is to show the one that was killed
        raise

"""
The trained control of an evaluation: one agent that answers alone, or for all roles, trained at the cost of a team.

It is trained with the settings of the team's run until it has spent at least as many scored answers and generated tokens, as its trainer counts
them. The number of optimizer steps is estimated before the training, for the schedule of the learning rate. An answer may have as many tokens
as all of the team's answers together.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import SchedulerType, TrainerCallback, TrainerControl, TrainerState

from trl_multiagent.environments.task import Task
from trl_multiagent.jobs.processes import start_processes
from trl_multiagent.jobs.stage import Stage
from trl_multiagent.recipe.checks import check_run, check_team
from trl_multiagent.recipe.run import parse_recipe, train
from trl_multiagent.settings.algorithms import ALGORITHMS, ROLLOUTS
from trl_multiagent.settings.read import ConfigError, read_yaml
from trl_multiagent.settings.schema import algorithm_keys
from trl_multiagent.trainers.base.log import COST_FILE


if TYPE_CHECKING:
    from datasets import Dataset

    from trl_multiagent.environments.base import Environment
    from trl_multiagent.recipe.recipe import Recipe
    from trl_multiagent.team.agent_team import AgentTeam
    from trl_multiagent.trainers.base.rollout_trainer import RolloutTrainer


CONTROL_FILE = "control.json"  # in the folder of a control that is complete
MEASURED_ITEMS = 64  # whose answers are sampled to estimate the tokens of an answer
MOST_STEPS = 4  # times the estimate, where the schedule of the learning rate does not depend on the number of steps


@dataclass(frozen=True)
class TrainingCost:
    """
    What the training of a team cost.

    Args:
        env_steps (`int`): Scored joint answers.
        generated_tokens (`int`): Tokens that all agents generated.
    """

    env_steps: int
    generated_tokens: int


class StopWhenSpent(TrainerCallback):
    """
    Ends a training as soon as it has cost as much as another one: at least as many env steps, and at least as many generated tokens.

    Args:
        trainer ([`~trl_multiagent.trainers.base.rollout_trainer.RolloutTrainer`]): The trainer, which counts both.
        cost ([`TrainingCost`]): The cost of the other training.
    """

    def __init__(self, trainer: RolloutTrainer, cost: TrainingCost):
        self.trainer, self.cost = trainer, cost

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        has_spent = self.trainer.env_step >= self.cost.env_steps
        has_spent &= self.trainer.generated_tokens >= self.cost.generated_tokens
        if has_spent and state.global_step % args.num_iterations == 0:  # all steps of a batch of trees are taken
            state.max_steps = state.global_step
            control.should_training_stop = True


def read_cost(run_folder: Path) -> TrainingCost:
    """
    Reads what a run cost.

    Raises:
        ConfigError: the folder has no record of it.
    """
    path = run_folder / COST_FILE
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
        return TrainingCost(int(numbers["env_steps"]), int(numbers["generated_tokens"]))
    except OSError as error:
        raise ConfigError(
            f"The control of {run_folder} needs {path}, which a run of an online algorithm writes when its training ends: {error.strerror}."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}.") from error


@dataclass(frozen=True)
class Control:
    """
    The control of one run.

    Args:
        kind (`str`): `"single_agent"` or `"centralized"`.
        run_config (`str`): The settings of the run.
        folder (`Path`): The folder of the control's run.
        model (`str`): The model that it starts from.
        num_agents (`int`): Number of agents of the team.
        task ([`~trl_multiagent.environments.task.Task`] or `Mapping[str, str]`): See [`~recipe.run.run_recipe`].
        task_name (`str`, *optional*): The task, if the user chose one.
        prog (`str`): Name of the program in messages.
    """

    kind: str
    run_config: str
    folder: Path
    model: str
    num_agents: int
    task: Task | Mapping[str, str]
    task_name: str | None
    prog: str

    def check(self) -> TrainingCost:
        """
        Checks that the control can be trained, or was trained with the same settings, and returns the cost of its run.

        Raises:
            ConfigError: the run has no record of its cost, or was not trained with an online algorithm.
            StageChanged: the folder holds another control.
        """
        _ = self.algorithm
        cost = read_cost(Path(self.run_config).parent)
        if self.is_trained:
            self.stage(cost).check()
        return cost

    def stage(self, cost: TrainingCost) -> Stage:
        """Returns the training of the control, which depends on its kind, its model and the cost of the run."""
        settings = {"control": self.kind, "control_model": self.model, **asdict(cost)}
        advice = "choose another `evaluation.output_dir`"
        return Stage(self.folder, "control", settings, start_processes(), advice=advice)

    @functools.cached_property
    def written(self) -> dict[str, Any]:
        """The settings of the run."""
        return read_yaml(self.run_config)

    @property
    def algorithm(self) -> str:
        """
        The algorithm of the run.

        Raises:
            ConfigError: it does not learn from rollouts.
        """
        algorithm = next((name for name in self.written if name in ALGORITHMS), None)
        if algorithm is None or ALGORITHMS[algorithm].run != ROLLOUTS:
            raise ConfigError(
                f"The control is trained with the algorithm of its run, which must learn from rollouts, such as magrpo; the run of "
                f"{self.run_config} has {algorithm or 'none'}."
            )
        return algorithm

    @property
    def is_trained(self) -> bool:
        return (self.folder / CONTROL_FILE).is_file()

    def argv(self) -> list[str]:
        """The arguments of the control's run, without the number of its optimizer steps."""
        algorithm = self.algorithm
        section = self.written[algorithm]
        length = section.get("max_completion_length", algorithm_keys(algorithm)["max_completion_length"].default)
        mode = {"num_agents": 1} if self.kind == "single_agent" else {"collaboration_mode": "centralized"}
        changes: dict[str, Any] = {
            **mode,
            "early_termination_threshold": None,  # the reward of one agent may have another maximum
            "max_completion_length": self.num_agents * length,
            "output_dir": str(self.folder),
            "report_to": "none",
            "push_to_hub": False,
        }
        changes |= {
            name: None for name in ("frozen_agents", "agent_learning_rates", "critic_models") if name in section
        }
        overrides = [f"{algorithm}.{name}={json.dumps(value)}" for name, value in changes.items()]
        overrides += ["agents=null", f"agent_model.name={self.model!r}", "output.save_path=null"]
        overrides += ["output.save_final_model=true"]
        argv = ["--config", self.run_config, "--override", *overrides]
        return argv if self.task_name is None else [*argv, "--task", self.task_name]

    def read_run(self) -> tuple[Recipe, Environment, Dataset]:
        """
        Reads and checks the settings and the items of the control's own run, without loading a model. Settings that its arguments
        do not allow end the program.

        Returns:
            `tuple`: The recipe, the environment and the items.

        Raises:
            ValueError, OSError or RuntimeError: the task, the model or the data do not allow this run.
        """
        recipe = parse_recipe(self.algorithm, self.task, self.argv(), self.prog)
        environment = recipe.make_environment()
        check_team(recipe, environment.roles)
        train_dataset, _ = recipe.load_datasets()
        return recipe, environment, train_dataset

    def train(self, cost: TrainingCost) -> None:
        """Trains the control and saves it in its folder."""
        algorithm, stage = self.algorithm, self.stage(cost)
        recipe, environment, train_dataset = self.read_run()
        with recipe.reservation:
            check_run(recipe, environment, train_dataset)
            if stage.state.is_main_process:
                stage.begin()
            team = recipe.load_team(environment.roles)
            tokens = tokens_per_answer(
                team, environment, train_dataset.select(range(min(MEASURED_ITEMS, len(train_dataset)))), recipe
            )
            args = recipe.training_args
            args.max_steps = steps_at_cost(cost, answers_per_batch(recipe), tokens, args.num_iterations)
            if args.lr_scheduler_type == SchedulerType.CONSTANT:
                args.max_steps *= MOST_STEPS
            recipe.merged[algorithm]["max_steps"] = args.max_steps
            if args.process_index == 0:
                print(
                    f"Training the control of {self.run_config} until it has {cost.env_steps} scored answers and "
                    f"{cost.generated_tokens} generated tokens, for {args.max_steps} steps at most.",
                    flush=True,
                )
            train(
                recipe, algorithm, environment, team, train_dataset, None, functools.partial(StopWhenSpent, cost=cost)
            )
        stage.save_result(CONTROL_FILE, stage.settings)


def answers_per_batch(recipe: Recipe) -> int:
    """Answers that one batch of a single agent's trees scores, in all processes."""
    args = recipe.training_args
    assert args.items_per_device is not None  # the configuration has set it
    return args.rows_per_item * args.items_per_device * args.world_size


def steps_at_cost(cost: TrainingCost, answers: int, tokens: float, num_iterations: int) -> int:
    """
    The optimizer steps after which a control has cost as many scored answers and about as many tokens as a team, if its answers keep
    their length.

    Args:
        cost ([`TrainingCost`]): The cost of the team.
        answers (`int`): Scored answers of a batch.
        tokens (`float`): Tokens of an answer.
        num_iterations (`int`): Optimizer steps per batch.
    """
    batches = max(cost.env_steps / answers, cost.generated_tokens / (answers * tokens))
    return math.ceil(batches) * num_iterations


def tokens_per_answer(team: AgentTeam, environment: Environment, items: Sequence[dict], recipe: Recipe) -> float:
    """The mean number of tokens of the untrained control's answers, the same in all processes."""
    args = recipe.training_args
    torch.manual_seed(args.seed)
    episodes = team.to(args.device).collaborate(
        items,
        environment,
        num_turns=args.num_turns,
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
    )
    (role,) = environment.roles
    texts = [turn.joint_action[role] for episode in episodes for turn in episode]
    measured = [fmean(len(ids) + 1 for ids in team.tokenizers[role](texts)["input_ids"])]  # and the end of the answer
    broadcast_object_list(measured)
    return measured[0]

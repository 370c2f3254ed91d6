"""
Trains the control of an evaluation: one agent that answers alone, or for all roles, trained at the cost of a team.

The control has the settings of the team's run, and an answer may have as many tokens as all of the team's together.
The training ends when its trainer has counted the same cost. A schedule of the learning rate has as many steps as the
scored answers of the team need.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import SchedulerType, TrainerCallback, TrainerControl, TrainerState

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.task import Task
from trl_multiagent.folders import read_json
from trl_multiagent.jobs.distributed import start_processes
from trl_multiagent.jobs.stage import Stage
from trl_multiagent.runs.evaluation_settings import Evaluation, TeamSource, algorithm_of, safe_settings
from trl_multiagent.runs.prepared import PreparedRun, check_run, check_team, prepare_training
from trl_multiagent.runs.run import settings_of
from trl_multiagent.runs.training import train
from trl_multiagent.settings.algorithms import ALGORITHMS, ROLLOUTS
from trl_multiagent.settings.derive import Settings, check_models
from trl_multiagent.settings.read import ConfigError, config_errors, read_yaml
from trl_multiagent.settings.schema import algorithm_keys
from trl_multiagent.trainers.base.metrics import COST_FILE
from trl_multiagent.trainers.base.rollout_trainer import RolloutTrainer


CONTROL_FILE = "control.json"  # in the folder of a control that is complete
MOST_STEPS = 4  # limit as a multiple of these steps, if the learning rate does not depend on their number


class TrainingCost(NamedTuple):
    """The cost of a training: scored joint answers, and tokens that all agents generated."""

    env_steps: int
    generated_tokens: int


class StopWhenSpent(TrainerCallback):
    """Ends a training as soon as its trainer has counted at least as many env steps and generated tokens as `cost`."""

    def __init__(self, trainer: RolloutTrainer, cost: TrainingCost):
        self.trainer, self.cost = trainer, cost

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        cost, trainer = self.cost, self.trainer
        has_spent = trainer.env_step >= cost.env_steps and trainer.generated_tokens >= cost.generated_tokens
        if has_spent and state.global_step % args.num_iterations == 0:  # all steps of a batch of trees are taken
            state.max_steps = state.global_step
            control.should_training_stop = True


def read_cost(run_folder: Path) -> TrainingCost:
    """Reads the cost of a run. Raises `ConfigError` if the folder has no record of it."""
    with config_errors("The control needs the cost of a complete run of an online algorithm: ", (OSError, ValueError)):
        numbers = read_json(run_folder / COST_FILE)
        return TrainingCost(numbers["env_steps"], numbers["generated_tokens"])


@dataclass(frozen=True)
class Control:
    """The control of one run."""

    run_config: str  # file with the settings of the run
    cost: TrainingCost  # of the run
    folder: Path  # of the control
    num_agents: int  # of the team
    settings: Settings  # of the control's training, without the number of its optimizer steps
    stage: Stage  # the training, which depends on the control's kind, its model and the cost of the run

    @property
    def is_trained(self) -> bool:
        return self.stage.has(CONTROL_FILE)

    def read_run(self) -> tuple[PreparedRun, Environment, Dataset]:
        """
        Checks the settings and the items of the control's training, without loading a model. A wrong setting ends the
        program.
        """
        run = prepare_training(self.settings)
        environment = run.make_environment()
        check_team(run, environment.roles)
        train_dataset, _ = run.load_datasets()
        return run, environment, train_dataset

    def train(self) -> None:
        """Trains the control and saves it in its folder."""
        run, environment, train_dataset = self.read_run()
        args = run.training_args
        with run.reservation:
            check_run(run, environment, train_dataset)
            if self.stage.state.is_main_process:
                self.stage.begin()
            team = run.load_team(environment.roles)
            answers = args.rows_per_item * run.items_per_step  # of one batch of trees, in all processes
            args.max_steps = math.ceil(self.cost.env_steps / answers) * args.num_iterations
            if args.lr_scheduler_type == SchedulerType.CONSTANT:
                args.max_steps *= MOST_STEPS
            run.merged[run.algorithm]["max_steps"] = args.max_steps
            if args.process_index == 0:
                limit = f"until it has cost {self.cost}, for {args.max_steps} steps at most"
                print(f"Training the control of {self.run_config} {limit}.", flush=True)
            stop = functools.partial(StopWhenSpent, cost=self.cost)
            train(run, environment, team, train_dataset, None, stop)
        self.stage.save_result(CONTROL_FILE, self.stage.settings)


def make_controls(evaluation: Evaluation, kind: str, task: Task | Mapping[str, str]) -> dict[str, Control]:
    """
    Makes the controls of the teams that the settings ask for, by the names of the teams. Raises `ConfigError` if one
    is impossible.
    """
    settings, base = evaluation.settings, evaluation.base
    if settings.is_centralized or settings.num_agents == 1:
        raise ConfigError("`evaluation.control` is for teams, but this run has one agent: leave it out.")
    model = evaluation.config.control_model or (base[-1] if isinstance(base, list) and base else base)
    if not isinstance(model, str):
        raise ConfigError("The model that the control starts from is not known: give `--control_model`.")
    check_models("control_model", model, settings.task.models)
    return {team.name: make_control(evaluation, team, kind, model, task) for team in evaluation.teams}


def make_control(
    evaluation: Evaluation, team: TeamSource, kind: str, model: str, task: Task | Mapping[str, str]
) -> Control:
    """Makes the control of one team, see [`make_controls`]."""
    if team.run_config is None:
        raise ConfigError(f"The control of {team.location} needs the folder of a run, with its config.yaml.")
    cost = read_cost(Path(team.run_config).parent)
    folder = evaluation.output_dir / "controls" / team.name
    decisive = {"control": kind, "control_model": model, **cost._asdict()}
    stage = Stage(folder, "control", decisive, start_processes(), advice="choose another `evaluation.output_dir`")
    if stage.has(CONTROL_FILE):
        stage.check()
    algorithm = algorithm_of(read_yaml(team.run_config))
    if algorithm is None or ALGORITHMS[algorithm].run != ROLLOUTS:
        problem = f"{team.run_config} has {algorithm or 'none'}"
        raise ConfigError(f"The control needs a run of an algorithm that learns from rollouts; {problem}.")
    num_agents = len(team.roles or ()) or evaluation.settings.num_agents
    written = safe_settings(algorithm, task, team.run_config, evaluation.arguments)
    section = written.get(algorithm, {})
    length = section.get("max_completion_length", algorithm_keys(algorithm)["max_completion_length"].default)
    changes: dict[str, Any] = {
        **({"num_agents": 1} if kind == "single_agent" else {"collaboration_mode": "centralized"}),
        "early_termination_threshold": None,  # the reward of one agent may have another maximum
        "max_completion_length": num_agents * length,
        "output_dir": str(folder),
        "report_to": "none",
        "push_to_hub": False,
    }
    changes |= {name: None for name in ("frozen_agents", "agent_learning_rates", "critic_models") if name in section}
    own: dict[str, Any] = {
        algorithm: changes,
        "agents": None,
        "agent_model": {"name": model},
        "output": {"save_path": None, "save_final_model": True},
        **({} if evaluation.arguments.task is None else {"task": evaluation.arguments.task}),
    }
    settings = settings_of(algorithm, task, [written, own], evaluation.settings.prog, evaluation.arguments.config)
    return Control(team.run_config, cost, folder, num_agents, settings, stage)


def cost_note(controls: Mapping[str, Control]) -> str:
    """Describes the cost of the trainings of the teams and of their controls."""
    answers, tokens = map(sum, zip(*(control.cost for control in controls.values()), strict=True))
    own_answers, own_tokens = map(sum, zip(*(read_cost(x.folder) for x in controls.values()), strict=True))
    return (
        f"Trainings of team and control: {answers:,} and {own_answers:,} scored answers, {tokens:,} and "
        f"{own_tokens:,} generated tokens. The reward of one agent may have another maximum: compare what passes."
    )

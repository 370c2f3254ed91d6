"""The settings of the recipes that learn from preferences, and the plan that a dry run prints."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from datasets import Dataset
from transformers.trainer_utils import get_last_checkpoint

from trl_multiagent.folders import is_collection
from trl_multiagent.jobs.processes import start_processes
from trl_multiagent.jobs.stage import Stage
from trl_multiagent.preferences.comparators import ROUND_FOLDER
from trl_multiagent.preferences.config import PreferenceConfig
from trl_multiagent.preferences.replay import ReplayConfig
from trl_multiagent.recipe.collection import cost, make_config
from trl_multiagent.recipe.folders import check_folder
from trl_multiagent.recipe.plan import agents, collaboration, count
from trl_multiagent.recipe.recipe import Recipe, build_recipe
from trl_multiagent.settings.algorithms import ITERATIVE
from trl_multiagent.settings.derive import Settings
from trl_multiagent.settings.read import ConfigError
from trl_multiagent.trainers.base.checkpoint_files import read_checkpoint, verify_checkpoint
from trl_multiagent.trainers.madpo_trainer import MADPOTrainer


if TYPE_CHECKING:
    from trl_multiagent.environments.base import Environment


# In the folder of the run. Names with an underscore are not pushed
PREFERENCES_FOLDER = "_preferences"
ROUNDS_FOLDER = "_rounds"
TEAMS_FOLDER = "teams"  # in `ROUNDS_FOLDER`: the team before each round
RESULTS_FILE = "results.json"  # written last: the round, or the run, is complete
# Settings that may differ when a run is continued, by section
FREE_SECTIONS = ("output", "wandb")
FREE_KEYS = (
    "num_iterations",
    "logging_steps",
    "report_to",
    "disable_tqdm",
    "push_to_hub",
    "hub_model_id",
    "output_dir",
)


@dataclasses.dataclass(kw_only=True)
class PreferenceRecipe(Recipe):
    """
    The checked settings of a run that learns from preferences.

    Args:
        preferences ([`~trl_multiagent.preferences.PreferenceConfig`]): The settings of the collection.
        replay ([`~trl_multiagent.preferences.ReplayConfig`]): Which preferences of earlier rounds are trained on again.
        num_iterations (`int`, *optional*): Number of rounds of `madpo_iter`; `None` for `madpo`.
    """

    preferences: PreferenceConfig
    replay: ReplayConfig
    num_iterations: int | None

    role_arguments: ClassVar[tuple[str, ...]] = ("frozen_agents", "agent_learning_rates")
    training_args: Any  # `MADPOConfig`

    @property
    def items_per_step(self) -> int:
        return 1  # the collection takes any number of items

    @property
    def trainer_class(self) -> type[Any]:
        return MADPOTrainer

    @property
    def given_preferences(self) -> str | None:
        """The dataset that the user trains on; `None` if this run collects one."""
        return self.settings.arguments.get("preference_dataset")

    @functools.cached_property
    def stage(self) -> Stage:
        """Returns the work of the run. [`~recipe.checks.check_run`] locks its folder."""
        settings = decisive_settings(self.merged, self.algorithm)
        advice = f"choose another folder, or set `{self.algorithm}.resume_changes: allow`"
        return Stage(self.run_folder, "run", settings, start_processes(), advice=advice)

    @property
    def rounds_folder(self) -> Path:
        return self.run_folder / ROUNDS_FOLDER

    @property
    def teams_folder(self) -> Path:
        assert self.preferences.policy_checkpoint_dir is not None
        return Path(self.preferences.policy_checkpoint_dir)

    def arguments_to_go_on(self) -> list[str]:
        """The arguments to add to the command of this run, so that it goes on: none if the command names the folder of the run."""
        given = self.settings.values[self.algorithm]
        is_named = "output_dir" in given or os.environ.get("RUN_ID") or os.environ.get("JOB_ID")
        return [] if is_named else ["--output_dir", str(self.run_folder)]

    def check_checkpoint(self, folder: str, environment: Environment, train_dataset: Dataset) -> None:
        # The trainer compares the rest, because the preferences are not collected yet
        check_processes(verify_checkpoint(folder), folder, self.training_args.world_size)

    def check_run_folder(self) -> None:
        """
        Checks that what the folder of the run holds belongs to this run.

        Raises:
            StageChanged: a complete phase in it had other settings.
            ConfigError: the checkpoint of an interrupted phase is of another number of processes.
        """
        folders = [self.run_folder, *self.rounds_folder.glob("*/")]
        for checkpoint in filter(None, (get_last_checkpoint(str(x)) for x in folders if x.is_dir())):
            if not (Path(checkpoint).parent / RESULTS_FILE).is_file():
                check_processes(read_checkpoint(checkpoint), checkpoint, self.training_args.world_size)
        is_begun = any(self.rounds_folder.glob(f"*/{RESULTS_FILE}")) or self.stage.has(RESULTS_FILE)
        if is_begun and self.training_args.resume_changes != "allow":
            self.stage.check()


def check_processes(saved: Mapping[str, Any], checkpoint: str, number: int) -> None:
    """
    Refuses to continue a checkpoint in another number of processes, before anything is loaded.

    Args:
        saved (`Mapping`): The state of the checkpoint, see [`~checkpoint_files.read_checkpoint`].
        checkpoint (`str`): Its folder.
        number (`int`): The number of processes of this run.

    Raises:
        ConfigError: it was saved by another number of processes.
    """
    before = saved["settings"]["number of processes"]
    if before != number:
        raise ConfigError(
            f"{checkpoint} was saved by {before} processes, and this run has {number}: continue it with `--num_processes {before}`, or "
            "choose another folder."
        )


def decisive_settings(merged: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Returns the settings that must be the same when a run goes on, by their paths."""
    values = {}
    for section, body in merged.items():
        if not isinstance(body, Mapping):
            values[section] = body
        elif section not in FREE_SECTIONS:
            free = FREE_KEYS if section == algorithm else ()
            values |= {f"{section}.{name}": value for name, value in body.items() if name not in free}
    return values


def preference_fields(settings: Settings, training_args: Any, dry_run: bool) -> dict[str, Any]:
    """
    The fields of a [`PreferenceRecipe`]: those of every recipe, and the settings of collection and replay.

    Args:
        settings ([`~trl_multiagent.settings.derive.Settings`]): The settings.
        training_args ([`~transformers.TrainingArguments`]): The arguments of the trainer.
        dry_run (`bool`): Whether the run only prints its plan.

    Raises:
        ConfigError: a setting is wrong.
    """
    algorithm, given = settings.algorithm, settings.values[settings.algorithm]
    iterative = algorithm in ITERATIVE
    if settings.extras.resume_from_checkpoint is True:  # every run goes on; an early phase has no checkpoint yet
        settings.extras.resume_from_checkpoint = None
        if "output_dir" not in given and not (os.environ.get("RUN_ID") or os.environ.get("JOB_ID")):
            raise ConfigError(
                "`resume_from_checkpoint: true` continues the run that the environment variable RUN_ID or `output_dir` "
                "names; set one of them, or give the folder of a checkpoint."
            )
    if iterative and settings.extras.resume_from_checkpoint is not None:
        raise ConfigError(
            f"`{algorithm}.resume_from_checkpoint` cannot be a folder: a run in rounds goes on by itself if it is started "
            "again with the same RUN_ID or `output_dir`."
        )
    recipe = build_recipe(settings, training_args, dry_run)
    changes: dict[str, Any] = {"disable_tqdm": training_args.disable_tqdm}
    if not iterative:
        changes["output_dir"] = given.get("preference_dataset") or str(recipe.run_folder / PREFERENCES_FOLDER)
    elif given.get("preference_dataset") is not None:
        raise ConfigError(f"`{algorithm}.preference_dataset` cannot be used: every round collects its preferences.")
    else:
        teams = given.get("policy_checkpoint_dir") or recipe.run_folder / ROUNDS_FOLDER / TEAMS_FOLDER
        changes["policy_checkpoint_dir"] = str(teams)
        check_folder(f"`{algorithm}.policy_checkpoint_dir`", Path(teams))
    return {
        **vars(recipe),
        "preferences": make_config(settings, **changes),
        "replay": settings.part(ReplayConfig),
        "num_iterations": settings.arguments["num_iterations"] if iterative else None,
    }


def pair_lines(recipe: PreferenceRecipe, environment: Environment) -> dict[str, Any]:
    """
    The plan of a run, made without loading a model.

    Args:
        recipe ([`PreferenceRecipe`]): The settings.
        environment ([`~trl_multiagent.environments.Environment`]): The task's environment.
    """
    args, roles, config = recipe.training_args, environment.roles, recipe.preferences
    lines: dict[str, Any] = {"algorithm": f"{recipe.algorithm}, loss {' + '.join(args.loss_type)}, beta {args.beta:g}"}
    lines |= collaboration(recipe)
    lines["agents"] = f"{agents(recipe.model_names, roles)} ({recipe.form_in_words})"
    if recipe.num_iterations is not None:
        lines["rounds"] = f"{recipe.num_iterations}, preference_replay_mode {recipe.replay.preference_replay_mode}"
    if recipe.given_preferences is not None:
        lines["preferences"] = recipe.given_preferences
    else:
        if recipe.num_iterations is not None:
            folder = recipe.rounds_folder / ROUND_FOLDER.format(0) / "preferences"
            config = dataclasses.replace(config, output_dir=str(folder))
            lines["each round"] = "collects, draws from these and earlier preferences, and trains"
        lines |= cost(config, environment, lambda: recipe.load_datasets()[0])
    pairs = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps = f"max_steps {args.max_steps}" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
    lines["training"] = f"{count(pairs, 'pair')} per optimizer step, {steps}, learning rate {args.learning_rate:g}"
    split = recipe.dataset.eval_split
    lines["evaluation"] = (
        "none" if split is None else f"the task's reward on split {split}, eval_strategy {args.eval_strategy.value}"
    )
    lines["output folder"] = recipe.run_folder
    lines["trained team"] = recipe.team_folder if recipe.saves_team else "not saved"
    if (recipe.run_folder / RESULTS_FILE).is_file() or is_collection(config.output_dir):
        lines["done already"] = "some phases, which are skipped if the settings have not changed"
    return lines

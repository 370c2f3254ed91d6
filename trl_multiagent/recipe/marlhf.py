"""MARLHF: collects preferences, trains a joint reward model on them, and trains the team with its reward."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_multiagent.environments.task import Task
from trl_multiagent.environments.task_errors import TaskError, UnavailableError
from trl_multiagent.quiet import quiet_libraries
from trl_multiagent.recipe.algorithms import ALGORITHMS
from trl_multiagent.recipe.arguments import Settings, make_training_args
from trl_multiagent.recipe.collection import FOLDER, Collection, check_comparator, make_config, print_cost
from trl_multiagent.recipe.run import read_settings
from trl_multiagent.recipe.settings import ConfigError, fail


if TYPE_CHECKING:
    from datasets import Dataset
    from peft import LoraConfig

    from trl_multiagent.environments.base import Environment
    from trl_multiagent.preferences.config import PreferenceConfig
    from trl_multiagent.recipe.recipe import Recipe
    from trl_multiagent.team.agent_team import AgentTeam
    from trl_multiagent.trainers.joint_reward_config import JointRewardConfig


SECTION = "marlhf"
REWARD_FOLDER = "reward_model"  # in the folder of the run
DEFAULT_MAX_LENGTH = 2048


@dataclass
class Phases:
    """
    The checked settings of a MARLHF run.

    Args:
        recipe ([`~trl_multiagent.recipe.recipe.Recipe`]): The training of the team, with the whole run's settings.
        settings ([`~trl_multiagent.recipe.arguments.Settings`]): All settings.
        rl_algorithm (`str`): The algorithm that trains the team.
        collection ([`~trl_multiagent.preferences.PreferenceConfig`]): The settings of the collection.
        reward_args ([`JointRewardConfig`]): The arguments of the reward model's trainer.
        reward_peft ([`~peft.LoraConfig`], *optional*): The adapter of the reward model.
    """

    recipe: Recipe
    settings: Settings
    rl_algorithm: str
    collection: PreferenceConfig
    reward_args: JointRewardConfig
    reward_peft: LoraConfig | None

    def given(self, name: str, default: Any) -> Any:
        """The value of a key of the section."""
        return self.settings.values[SECTION].get(name, default)

    @property
    def preference_dataset(self) -> str | None:
        return self.given("preference_dataset", None)


def run_marlhf(
    algorithm: str, task: Task | Mapping[str, str], argv: Sequence[str] | None = None, prog: str | None = None
) -> None:
    """
    Runs MARLHF on a task, or prints the plan if `--dry_run` is given. Wrong settings end the program.

    Started again with the same folder, it continues: phases that are complete are skipped, the others go on where they were.

    Args:
        algorithm (`str`): Name of the section, `marlhf`.
        task ([`~trl_multiagent.environments.task.Task`] or `Mapping[str, str]`):
            What to train on; or, if the user chooses that, the tasks that have a name, see
            [`~trl_multiagent.recipe.tasks.choose_task`].
        argv (`list[str]`, *optional*): Arguments; by default those of the command line.
        prog (`str`, *optional*): Name of the program in messages; by default that of the script.
    """
    prog = prog or Path(sys.argv[0]).name
    quiet_libraries()
    try:
        settings, dry_run = read_settings(algorithm, task, argv, prog)
        phases = make_phases(settings, dry_run)
    except ConfigError as error:
        fail(prog, error)
    recipe = phases.recipe
    recipe.prog = prog
    logging.basicConfig(format="%(message)s")
    if recipe.training_args.process_index == 0:
        logging.getLogger("trl_multiagent").setLevel(logging.INFO)
        for note in recipe.notes:
            print(f"{prog}: note: {note}", file=sys.stderr)
    if not dry_run:
        recipe.introduce()
    try:
        environment = recipe.make_environment()
        if dry_run:
            return print_phases(phases, environment)
        if phases.preference_dataset is None:
            check_comparator(phases.collection)
        train_dataset, eval_dataset = recipe.load_datasets()
        if recipe.resume_from_checkpoint is None:
            recipe.check_run(environment, train_dataset)
        team = recipe.load_team(environment.roles)
        preferences = phase_1(phases, environment, train_dataset, team)
        environment = phase_2(phases, environment, preferences)
    except UnavailableError as error:
        fail(prog, error)
    except TaskError:
        raise  # its traceback says where the code of the task failed
    except (ValueError, OSError, RuntimeError) as error:
        fail(prog, error)
    if recipe.resume_from_checkpoint is not None:
        recipe.check_run(environment, train_dataset)
    phase_3(phases, environment, team, train_dataset, eval_dataset)


def phase_1(phases: Phases, environment: Environment, items: Dataset, team: AgentTeam) -> Dataset:
    """Collects preferences, or loads those that the settings name."""
    from trl_multiagent.preferences import collect_preferences, load_preferences
    from trl_multiagent.preferences.collection import start_processes
    from trl_multiagent.recipe.recipe import first_rows

    announce(phases, "Phase 1 of 3: preferences")
    if phases.preference_dataset is not None:
        return load_preferences(phases.preference_dataset, environment.roles)
    config, models = phases.collection, phases.settings.task.models
    if config.comparator_model_name in models:
        config = dataclasses.replace(config, comparator_model_name=models[config.comparator_model_name]())
    state = start_processes()
    if not phases.recipe.agent_model.is_quantized:
        team.to(state.device)
    items = first_rows(items, phases.given("preference_num_items", None))
    preferences = collect_preferences(team, environment, items, config)
    if len(preferences) == 0:
        raise ConfigError(
            f"All joint answers to an item have the same reward, so there are no preferences: raise "
            f"`{SECTION}.preference_num_candidates` or `temperature`."
        )
    announce(phases, f"{len(preferences)} preferences in {config.output_dir}")
    return preferences


def phase_2(phases: Phases, environment: Environment, preferences: Dataset) -> Environment:
    """Trains the reward model. Returns the environment that has its reward."""
    from trl_multiagent.environments.model_reward import ModelRewardEnvironment
    from trl_multiagent.environments.reward_models import JointRewardModel
    from trl_multiagent.recipe.reward_phase import summary, train_reward_model
    from trl_multiagent.trainers.base.run_settings import checksum_of_weights
    from trl_multiagent.trainers.joint_reward_trainer import SCALE_KEY

    announce(phases, "\nPhase 2 of 3: the reward model")
    args, names = phases.reward_args, phases.recipe.models()
    first = names if isinstance(names, str) else names[0]
    model = phases.given("reward_model_name", None) or first
    models = phases.settings.task.models
    if model in models:
        model = models[model]()
    facts = train_reward_model(model, args, preferences, list(environment.roles), phases.reward_peft)
    announce(phases, f"Reward model in {args.output_dir}: {summary(facts)}")
    reward = JointRewardModel(args.output_dir)
    return ModelRewardEnvironment(
        environment,
        reward,
        scale=reward.model.config.to_dict().get(SCALE_KEY),
        score_task=phases.given("score_task_reward", True),
        version=checksum_of_weights(reward.model.parameters()),
    )


def phase_3(
    phases: Phases, environment: Environment, team: AgentTeam, train_dataset: Dataset, eval_dataset: Dataset | None
) -> None:
    """Trains the team with the reward of the model, and saves it."""
    from trl_multiagent.trainers.reward_watch import RewardWatch

    announce(phases, f"\nPhase 3 of 3: {phases.rl_algorithm} with the reward of the model")
    recipe = phases.recipe
    trainer = ALGORITHMS[phases.rl_algorithm].trainer_class()(
        team=team,
        environment=environment,
        args=recipe.training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        callbacks=[RewardWatch()],
    )
    recipe.train_and_save(trainer)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def announce(phases: Phases, text: str) -> None:
    """Prints a line, once."""
    if phases.recipe.training_args.process_index == 0:
        print(text, flush=True)


def make_phases(settings: Settings, dry_run: bool = False) -> Phases:
    """
    Derives the settings of the three phases, without loading a model or data.

    Raises:
        ConfigError: a setting is wrong.
    """
    algorithm = settings.values[SECTION].get("rl_algorithm", "magrpo")
    collection = make_config(settings)  # its rewards pass the reward processor
    config_class = ALGORITHMS[algorithm].config_class()
    training_args = make_training_args(settings_of_training(settings, config_class), config_class)
    from trl_multiagent.recipe.recipe import build_recipe  # takes as long as TRL

    resumes = settings.extras.resume_from_checkpoint is True
    if resumes:
        settings.extras.resume_from_checkpoint = None  # an earlier phase has no such checkpoint
        if "output_dir" not in settings.values[SECTION] and not (os.environ.get("RUN_ID") or os.environ.get("JOB_ID")):
            raise ConfigError(
                "`resume_from_checkpoint: true` continues the run that the environment variable RUN_ID or `output_dir` "
                "names; set one of them, or give the folder of a checkpoint."
            )
    recipe = build_recipe(settings, training_args, dry_run)
    if recipe.resume_from_checkpoint is None and recipe.run_folder.is_dir():
        recipe.resume_from_checkpoint = checkpoint_to_continue(recipe.run_folder)
    return Phases(
        recipe=recipe,
        settings=settings,
        rl_algorithm=algorithm,
        collection=dataclasses.replace(collection, output_dir=str(recipe.run_folder / FOLDER)),
        reward_args=make_reward_args(settings, recipe),
        reward_peft=make_reward_peft(settings),
    )


def settings_of_training(settings: Settings, config_class: type) -> Settings:
    """The settings with the arguments of the last phase only."""
    names = {field.name for field in dataclasses.fields(config_class)}
    arguments = {name: value for name, value in settings.arguments.items() if name in names}
    if not settings.values[SECTION].get("process_model_reward", False):
        arguments |= {"reward_scale": 1.0, "reward_shift": 0.0}
    return dataclasses.replace(settings, arguments=arguments)


def checkpoint_to_continue(run_folder: Path) -> str | None:
    """The last checkpoint of the last phase, if there is one."""
    from transformers.trainer_utils import get_last_checkpoint

    from trl_multiagent.recipe.recipe import check_complete

    checkpoint = get_last_checkpoint(str(run_folder))
    if checkpoint is not None:
        check_complete(checkpoint)
    return checkpoint


def make_reward_args(settings: Settings, recipe: Recipe) -> JointRewardConfig:
    """
    The arguments of the reward model's trainer.

    Raises:
        ConfigError: the configuration class refuses a value.
    """
    from trl_multiagent.trainers.joint_reward_config import JointRewardConfig

    given, args = settings.values[SECTION], recipe.training_args
    values: dict[str, Any] = {
        "learning_rate": given.get("reward_learning_rate", 1e-5),
        "num_train_epochs": given.get("reward_num_train_epochs", 1.0),
        "per_device_train_batch_size": given.get("reward_train_batch_size", 1),
        "per_device_eval_batch_size": max(8, given.get("reward_train_batch_size", 1)),
        "max_length": given.get("reward_max_length", DEFAULT_MAX_LENGTH),
        "freeze_backbone": given.get("reward_freeze_backbone", False),
        "eval_fraction": given.get("reward_eval_fraction", 0.1),
        "seed": args.seed,
        "bf16": args.bf16,  # accelerate has one precision per process
        "fp16": args.fp16,
        "deepspeed": args.deepspeed,
        "disable_tqdm": args.disable_tqdm,
        "gradient_checkpointing": args.gradient_checkpointing,
        "dataloader_pin_memory": args.dataloader_pin_memory,
        "trust_remote_code": recipe.agent_model.trust_remote_code,
        "logging_steps": 10,
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "report_to": "none",
    }
    try:
        folder = str(recipe.run_folder / REWARD_FOLDER)
        return JointRewardConfig(**{**values, **(given.get("reward_training") or {}), "output_dir": folder})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"section `{SECTION}`, the reward model: {error}") from error


def make_reward_peft(settings: Settings) -> LoraConfig | None:
    """
    The adapter of the reward model.

    Raises:
        ConfigError: PEFT refuses a value.
    """
    fields = settings.values[SECTION].get("reward_peft")
    if fields is None:
        return None
    from peft import LoraConfig

    if settings.values[SECTION].get("reward_freeze_backbone", False):
        raise ConfigError(f"`{SECTION}.reward_freeze_backbone` trains the head alone: remove `{SECTION}.reward_peft`.")
    try:
        return LoraConfig(**{"target_modules": "all-linear", **fields, "task_type": "SEQ_CLS"})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"`{SECTION}.reward_peft`: {error}") from error


def print_phases(phases: Phases, environment: Environment) -> None:
    """Prints the plan of a run, without loading a model."""
    from trl_multiagent.recipe.plan import print_plan

    recipe, args = phases.recipe, phases.reward_args
    if recipe.training_args.process_index == 0:
        print("Phase 1 of 3: preferences")
        if phases.preference_dataset is None:
            source = dataclasses.replace(
                recipe.dataset, size=phases.given("preference_num_items", None) or recipe.dataset.size
            )
            sections = {**phases.settings.sections, "dataset": source}
            settings = dataclasses.replace(phases.settings, sections=sections)
            print_cost(Collection(settings, phases.collection, True, recipe.prog), environment)
        else:
            print(f"  those of {phases.preference_dataset}")
        names = recipe.model_names if isinstance(recipe.model_names, str) else recipe.model_names[0]
        print("\nPhase 2 of 3: the reward model")
        lines = {"starts from": phases.given("reward_model_name", None) or names}
        lines["trained"] = (
            "the head"
            if args.freeze_backbone
            else "all weights"
            if phases.reward_peft is None
            else f"LoRA of rank {phases.reward_peft.r}"
        )
        lines["pairs"] = (
            f"{1 - args.eval_fraction:.0%} of the items, {args.num_train_epochs:g} epochs, "
            f"{args.per_device_train_batch_size} pairs per device and step, learning rate {args.learning_rate:g}"
        )
        lines["folder"] = args.output_dir
        for name, text in lines.items():
            print(f"  {name:<15}  {text}")
        print(f"\nPhase 3 of 3: {phases.rl_algorithm} with the reward of the model")
    print_plan(recipe, environment.roles)

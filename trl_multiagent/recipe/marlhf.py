"""
MARLHF: collects preferences, trains a joint reward model on them, and trains the team with its reward. Once (`marlhf`), or in rounds
(`marlhf_iter`), which are those of iterative MADPO with a reward model in between.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from trl_multiagent.environments.model_reward import ModelRewardEnvironment
from trl_multiagent.environments.reward_models import JointRewardModel
from trl_multiagent.identity import checksum_of_weights
from trl_multiagent.preferences.comparators import ROUND_FOLDER
from trl_multiagent.preferences.config import PreferenceConfig
from trl_multiagent.recipe.algorithms import ALGORITHMS, ITERATIVE
from trl_multiagent.recipe.arguments import Settings, make_training_args, section_defaults
from trl_multiagent.recipe.collection import Collection, print_cost
from trl_multiagent.recipe.dry_run import print_lines
from trl_multiagent.recipe.fields import read_fields
from trl_multiagent.recipe.plan import print_plan
from trl_multiagent.recipe.preference_recipe import PreferenceRecipe, preference_fields
from trl_multiagent.recipe.preference_run import PreferenceRun, without_sharding
from trl_multiagent.recipe.recipe import Recipe, check_models, first_rows
from trl_multiagent.recipe.reward_phase import check_reward_args, summary, train_reward_model
from trl_multiagent.recipe.reward_section import MARLHFSection
from trl_multiagent.recipe.run import end_on_wrong_input
from trl_multiagent.recipe.settings import ConfigError
from trl_multiagent.trainers.joint_reward_config import JointRewardConfig
from trl_multiagent.trainers.joint_reward_trainer import SCALE_KEY
from trl_multiagent.trainers.reward_watch import RewardWatch


if TYPE_CHECKING:
    from trl_multiagent.environments.base import Environment


REWARD_FOLDER = "reward_model"  # in the folder of a round; with an underscore in that of the run, which is pushed
DEFAULT_MAX_LENGTH = 2048


@dataclasses.dataclass(kw_only=True)
class RewardRecipe(PreferenceRecipe):
    """
    The checked settings of a MARLHF run.

    Args:
        rl_algorithm (`str`): The algorithm that trains the team.
        reward_args ([`JointRewardConfig`]): The arguments of the reward model's trainer.
        reward_peft ([`~peft.LoraConfig`], *optional*): The adapter of the reward model.
    """

    rl_algorithm: str
    reward_args: JointRewardConfig
    reward_peft: LoraConfig | None

    role_arguments: ClassVar[tuple[str, ...]] = Recipe.role_arguments

    @property
    def items_per_step(self) -> int:
        return self.training_args.items_per_device * self.training_args.world_size

    @property
    def trainer_class(self) -> type[Any]:
        return ALGORITHMS[self.rl_algorithm].trainer_class()

    def given(self, name: str, default: Any) -> Any:
        """The value of a key of the section."""
        return self.settings.values[self.algorithm].get(name, default)

    @property
    def reward_base(self) -> str:
        """The name of the model that the reward model starts from."""
        first = self.model_names if isinstance(self.model_names, str) else self.model_names[0]
        return self.given("reward_model_name", None) or first


class RewardRun(PreferenceRun):
    """One run of MARLHF. Its trainings have the reward of a model, which is trained on the preferences first."""

    recipe: RewardRecipe

    def __init__(self, recipe: RewardRecipe, environment: Environment, items: Dataset, eval_items: Dataset | None):
        super().__init__(recipe, environment, items, eval_items)
        self.items_to_compare = first_rows(items, recipe.given("preference_num_items", None))

    def collect(self, *args: Any) -> tuple[Dataset, dict[str, Any]]:
        self.say("Phase 1 of 3: preferences")
        preferences, numbers = super().collect(*args)
        self.say(f"{len(preferences)} preferences")
        return preferences, numbers

    def scoring(self, number: int) -> Environment:
        """Preferences are made from the task's rewards or, with `preference_scoring_reward: reward_model`, from those of the last round's model."""
        if number == 0 or self.recipe.given("preference_scoring_reward", "task") == "task":
            return self.environment
        folder = self.recipe.rounds_folder / ROUND_FOLDER.format(number - 1) / REWARD_FOLDER
        return self.with_reward_of(folder, score_task=False)

    def training_data(self, preferences: Dataset, folder: Path) -> tuple[Environment, Dataset]:
        recipe = self.recipe
        in_rounds = folder != recipe.run_folder
        self.say("\nPhase 2 of 3: the reward model")
        settings: Any = recipe.reward_args  # every training has a copy, with a DeepSpeed configuration of its own
        name = REWARD_FOLDER if in_rounds else f"_{REWARD_FOLDER}"
        args: JointRewardConfig = dataclasses.replace(settings, output_dir=str(folder / name))
        model = recipe.reward_base
        if model in recipe.task.models:
            with self.state.main_process_first():
                model = recipe.task.models[model]()
        with end_on_wrong_input(recipe.prog):
            facts = train_reward_model(model, args, preferences, list(self.roles), recipe.reward_peft)
        self.say(f"Reward model in {args.output_dir}: {summary(facts)}")
        self.stop_if_asked()
        self.say(f"\nPhase 3 of 3: {recipe.rl_algorithm} with the reward of the model")
        environment = self.with_reward_of(Path(args.output_dir), recipe.given("score_task_reward", True))
        return environment, self.items

    def with_reward_of(self, folder: Path, score_task: bool) -> Environment:
        """The task with the reward of a model."""
        with without_sharding(self.recipe.training_args):
            reward = JointRewardModel(str(folder))
        return ModelRewardEnvironment(
            self.environment,
            reward,
            scale=reward.model.config.to_dict().get(SCALE_KEY),
            score_task=score_task,
            version=checksum_of_weights(reward.model.parameters()),
        )

    def callbacks(self) -> list[TrainerCallback]:
        return [RewardWatch()]


def make_recipe(settings: Settings, dry_run: bool = False) -> RewardRecipe:
    """
    Derives the settings of the three phases, without loading a model or data.

    Raises:
        ConfigError: a setting is wrong.
    """
    algorithm = settings.values[settings.algorithm].get("rl_algorithm", "magrpo")
    config_class = ALGORITHMS[algorithm].config_class()
    training_args = make_training_args(settings_of_training(settings, config_class), config_class)
    reward_model = settings.arguments.get("reward_model_name")
    if reward_model is not None:
        check_models(f"{settings.algorithm}.reward_model_name", [reward_model], settings.task)
    fields = preference_fields(settings, training_args, dry_run)
    recipe = RewardRecipe(
        **fields,
        rl_algorithm=algorithm,
        reward_args=make_reward_args(settings, training_args),
        reward_peft=make_reward_peft(settings),
    )
    check_reward_args(f"{settings.algorithm}.reward_training", recipe.reward_args, recipe.reward_base)
    return recipe


def settings_of_training(settings: Settings, config_class: type) -> Settings:
    """The settings with the arguments of the last phase only."""
    names = {field.name for field in dataclasses.fields(config_class)}
    if settings.algorithm in ITERATIVE:
        names -= {"num_iterations"}  # the rounds; to the trainer, it is the number of steps on each batch
    arguments = {**section_defaults(settings.algorithm), **settings.arguments}
    algorithms = MARLHFSection.limits["rl_algorithm"]["choices"]
    trainers = {name for algorithm in algorithms for name in read_fields(ALGORITHMS[algorithm].config)}
    others = trainers - {field.name for field in dataclasses.fields(PreferenceConfig)} - {"num_iterations"}
    unused = [f"{settings.algorithm}.{name}" for name in arguments if name in others - names]
    if unused:
        settings.notes.append(f"these settings have no effect here, because of `rl_algorithm`: {', '.join(unused)}.")
    arguments = {name: value for name, value in arguments.items() if name in names}
    if not settings.values[settings.algorithm].get("process_model_reward", False):
        arguments |= {"reward_scale": 1.0, "reward_shift": 0.0}
    return dataclasses.replace(settings, arguments=arguments)


def make_reward_args(settings: Settings, args: Any) -> JointRewardConfig:
    """
    The arguments of the reward model's trainer. The folder is chosen when it is trained.

    Args:
        settings ([`~trl_multiagent.recipe.arguments.Settings`]): All settings.
        args ([`~transformers.TrainingArguments`]): Those of the team's trainer. Both use the same precision and devices.

    Raises:
        ConfigError: the configuration class refuses a value.
    """
    algorithm, given = settings.algorithm, settings.values[settings.algorithm]
    values: dict[str, Any] = {
        "learning_rate": given.get("reward_learning_rate", 1e-5),
        "num_train_epochs": given.get("reward_num_train_epochs", 2.0 if algorithm in ITERATIVE else 1.0),
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
        "trust_remote_code": settings.sections["agent_model"].trust_remote_code,
        "logging_steps": 10,
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "report_to": "none",
    }
    more = given.get("reward_training") or {}
    if "output_dir" in more:
        raise ConfigError(
            f"`{algorithm}.reward_training` must not have 'output_dir': the reward model is in the folder of the run."
        )
    try:
        return JointRewardConfig(**values | more, output_dir=args.output_dir)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"section `{algorithm}`, the reward model: {error}") from error


def make_reward_peft(settings: Settings) -> LoraConfig | None:
    """
    The adapter of the reward model.

    Raises:
        ConfigError: PEFT refuses a value.
    """
    algorithm, given = settings.algorithm, settings.values[settings.algorithm]
    fields = given.get("reward_peft")
    if fields is None:
        return None
    if given.get("reward_freeze_backbone", False):
        raise ConfigError(
            f"`{algorithm}.reward_freeze_backbone` trains the head alone: remove `{algorithm}.reward_peft`."
        )
    try:
        return LoraConfig(**{"target_modules": "all-linear", **fields, "task_type": "SEQ_CLS"})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"`{algorithm}.reward_peft`: {error}") from error


def print_phases(recipe: RewardRecipe, environment: Environment) -> None:
    """Prints the plan of a run, without loading a model."""
    args, settings, config = recipe.reward_args, recipe.settings, recipe.preferences
    in_rounds = recipe.num_iterations is not None
    folder = recipe.rounds_folder / ROUND_FOLDER.format(0) if in_rounds else recipe.run_folder
    if recipe.training_args.process_index == 0:
        if in_rounds:
            mode = recipe.replay.preference_replay_mode
            print(f"{recipe.num_iterations} rounds of three phases, preference_replay_mode {mode}\n")
            config = dataclasses.replace(config, output_dir=str(folder / "preferences"))
        print("Phase 1 of 3: preferences")
        if recipe.given_preferences is None:
            source = dataclasses.replace(
                recipe.dataset, size=recipe.given("preference_num_items", None) or recipe.dataset.size
            )
            sections = {**settings.sections, "dataset": source}
            print_cost(
                Collection(dataclasses.replace(settings, sections=sections), config, True, recipe.prog), environment
            )
        else:
            print(f"  those of {recipe.given_preferences}")
        print("\nPhase 2 of 3: the reward model")
        lines = {"starts from": recipe.reward_base}
        lines["trained"] = (
            "the head"
            if args.freeze_backbone
            else "all weights"
            if recipe.reward_peft is None
            else f"LoRA of rank {recipe.reward_peft.r}"
        )
        lines["pairs"] = (
            f"{1 - args.eval_fraction:.0%} of the items, {args.num_train_epochs:g} epochs, "
            f"{args.per_device_train_batch_size} pairs per device and step, learning rate {args.learning_rate:g}"
        )
        lines["folder"] = str(folder / (REWARD_FOLDER if in_rounds else f"_{REWARD_FOLDER}"))
        print_lines(lines)
        print(f"\nPhase 3 of 3: {recipe.rl_algorithm} with the reward of the model")
    print_plan(recipe, environment.roles)

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
from trl_multiagent.jobs.identity import checksum_of_weights
from trl_multiagent.preferences.comparators import ROUND_FOLDER
from trl_multiagent.preferences.config import PreferenceConfig
from trl_multiagent.recipe.collection import Collection, plan_of
from trl_multiagent.recipe.models import check_models
from trl_multiagent.recipe.plan import HEADING, print_plan, rollout_lines
from trl_multiagent.recipe.preference_recipe import PreferenceRecipe, preference_fields
from trl_multiagent.recipe.preference_run import PreferenceRun, run_phases, without_sharding
from trl_multiagent.recipe.recipe import Recipe, first_rows
from trl_multiagent.recipe.reward_phase import check_reward_args, summary, train_reward_model
from trl_multiagent.recipe.run import end_on_wrong_input
from trl_multiagent.settings.algorithms import ALGORITHMS, ITERATIVE, RL_ALGORITHMS
from trl_multiagent.settings.derive import Settings, make_training_args
from trl_multiagent.settings.read import ConfigError
from trl_multiagent.settings.schema import RewardSettings
from trl_multiagent.team.load import build
from trl_multiagent.trainers.joint_reward_config import JointRewardConfig
from trl_multiagent.trainers.joint_reward_trainer import SCALE_KEY
from trl_multiagent.trainers.reward_watch import RewardWatch


if TYPE_CHECKING:
    from trl_multiagent.environments.base import Environment


REWARD_FOLDER = "reward_model"  # in the folder of a round; with an underscore in that of the run, which is pushed


@dataclasses.dataclass(kw_only=True)
class RewardRecipe(PreferenceRecipe):
    """
    The checked settings of a MARLHF run.

    Args:
        reward (`RewardSettings`): The settings of the reward model.
        reward_args ([`JointRewardConfig`]): The arguments of the reward model's trainer.
        reward_peft ([`~peft.LoraConfig`], *optional*): The adapter of the reward model.
    """

    reward: RewardSettings
    reward_args: JointRewardConfig
    reward_peft: LoraConfig | None

    role_arguments: ClassVar[tuple[str, ...]] = Recipe.role_arguments

    @property
    def items_per_step(self) -> int:
        return self.training_args.items_per_device * self.training_args.world_size

    @property
    def trainer_class(self) -> type[Any]:
        return ALGORITHMS[self.reward.rl_algorithm].trainer_class()

    @property
    def reward_base(self) -> str:
        """The name of the model that the reward model starts from."""
        first = self.model_names if isinstance(self.model_names, str) else self.model_names[0]
        return self.reward.reward_model_name or first


class RewardRun(PreferenceRun):
    """One run of MARLHF. Its trainings have the reward of a model, which is trained on the preferences first."""

    recipe: RewardRecipe

    def __init__(self, recipe: RewardRecipe, environment: Environment, items: Dataset, eval_items: Dataset | None):
        super().__init__(recipe, environment, items, eval_items)
        self.items_to_compare = first_rows(items, recipe.reward.preference_num_items)

    def collect(self, *args: Any) -> tuple[Dataset, dict[str, Any]]:
        self.say("Phase 1 of 3: preferences")
        preferences, numbers = super().collect(*args)
        self.say(f"{len(preferences)} preferences")
        return preferences, numbers

    def scoring(self, number: int) -> Environment:
        """Preferences are made from the task's rewards or, with `preference_scoring_reward: reward_model`, from those of the last round's model."""
        if number == 0 or self.recipe.settings.arguments.get("preference_scoring_reward", "task") == "task":
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
        model = build(recipe.reward_base, recipe.task.models)
        with end_on_wrong_input(recipe.prog):
            facts = train_reward_model(model, args, preferences, list(self.roles), recipe.reward_peft)
        self.say(f"Reward model in {args.output_dir}: {summary(facts)}")
        self.stop_if_asked()
        self.say(f"\nPhase 3 of 3: {recipe.reward.rl_algorithm} with the reward of the model")
        environment = self.with_reward_of(Path(args.output_dir), recipe.reward.score_task_reward)
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


def run_marlhf(settings: Settings, dry_run: bool, prog: str) -> None:
    """
    Runs MARLHF, or prints the plan. Wrong settings end the program.

    Args:
        settings ([`~trl_multiagent.settings.derive.Settings`]): The settings.
        dry_run (`bool`): Whether to print the plan only.
        prog (`str`): Name of the program in messages.
    """
    with end_on_wrong_input(prog):
        recipe = make_recipe(settings, dry_run)
    recipe.prog = prog
    run_phases(recipe, RewardRun, lambda environment: print_phases(recipe, environment))


def make_recipe(settings: Settings, dry_run: bool = False) -> RewardRecipe:
    """
    Derives the settings of the three phases, without loading a model or data.

    Raises:
        ConfigError: a setting is wrong.
    """
    reward = settings.part(RewardSettings)
    config_class = ALGORITHMS[reward.rl_algorithm].config_class()
    training_args = make_training_args(settings_of_training(settings, config_class), config_class)
    if reward.reward_model_name is not None:
        check_models(f"{settings.algorithm}.reward_model_name", [reward.reward_model_name], settings.task)
    fields = preference_fields(settings, training_args, dry_run)
    recipe = RewardRecipe(
        **fields,
        reward=reward,
        reward_args=make_reward_args(settings, reward, training_args),
        reward_peft=make_reward_peft(settings.algorithm, reward),
    )
    check_reward_args(f"{settings.algorithm}.reward_training", recipe.reward_args, recipe.reward_base)
    return recipe


def settings_of_training(settings: Settings, config_class: type) -> Settings:
    """The settings with the arguments of the last phase only."""
    names = {field.name for field in dataclasses.fields(config_class)}
    if settings.algorithm in ITERATIVE:
        names -= {"num_iterations"}  # the rounds; to the trainer, it is the number of steps on each batch
    trainers = {
        field.name for algorithm in RL_ALGORITHMS for field in dataclasses.fields(ALGORITHMS[algorithm].config_class())
    }
    others = trainers - {field.name for field in dataclasses.fields(PreferenceConfig)} - {"num_iterations"}
    unused = [f"{settings.algorithm}.{name}" for name in settings.arguments if name in others - names]
    if unused:
        settings.notes.append(f"these settings have no effect here, because of `rl_algorithm`: {', '.join(unused)}.")
    arguments = {name: value for name, value in settings.arguments.items() if name in names}
    if not settings.part(RewardSettings).process_model_reward:
        arguments |= {"reward_scale": 1.0, "reward_shift": 0.0}
    return dataclasses.replace(settings, arguments=arguments)


def make_reward_args(settings: Settings, reward: RewardSettings, args: Any) -> JointRewardConfig:
    """
    The arguments of the reward model's trainer. The folder is chosen when it is trained.

    Args:
        settings ([`~trl_multiagent.settings.derive.Settings`]): All settings.
        reward (`RewardSettings`): Those of the reward model.
        args ([`~transformers.TrainingArguments`]): Those of the team's trainer. Both use the same precision and devices.

    Raises:
        ConfigError: the configuration class refuses a value.
    """
    values: dict[str, Any] = {
        "learning_rate": reward.reward_learning_rate,
        "num_train_epochs": reward.reward_num_train_epochs,
        "per_device_train_batch_size": reward.reward_train_batch_size,
        "per_device_eval_batch_size": max(8, reward.reward_train_batch_size),
        "max_length": reward.reward_max_length,
        "freeze_backbone": reward.reward_freeze_backbone,
        "eval_fraction": reward.reward_eval_fraction,
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
    more = reward.reward_training or {}
    if "output_dir" in more:
        raise ConfigError(
            f"`{settings.algorithm}.reward_training` must not have 'output_dir': the reward model is in the folder of the run."
        )
    try:
        return JointRewardConfig(**values | more, output_dir=args.output_dir)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"section `{settings.algorithm}`, `reward_training` or another argument of the reward model: {error}"
        ) from error


def make_reward_peft(algorithm: str, reward: RewardSettings) -> LoraConfig | None:
    """
    The adapter of the reward model.

    Raises:
        ConfigError: PEFT refuses a value.
    """
    fields = reward.reward_peft
    if fields is None:
        return None
    if reward.reward_freeze_backbone:
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
    number = recipe.num_iterations
    folder = recipe.run_folder if number is None else recipe.rounds_folder / ROUND_FOLDER.format(0)
    mode = recipe.replay.preference_replay_mode
    rounds = "" if number is None else f"\n\n{number} rounds of three phases, preference_replay_mode {mode}"
    print_plan({}, f"{HEADING}{rounds}")
    if recipe.given_preferences is not None:
        lines: dict[str, Any] = {"preferences": recipe.given_preferences}
    else:
        if number is not None:
            config = dataclasses.replace(config, output_dir=str(folder / "preferences"))
        size = recipe.reward.preference_num_items or recipe.dataset.size
        sections = {**settings.sections, "dataset": dataclasses.replace(recipe.dataset, size=size)}
        settings = dataclasses.replace(settings, sections=sections)
        lines = plan_of(Collection(settings, config, True, recipe.prog), environment)
    print_plan(lines, "\nPhase 1 of 3: preferences")
    adapter = "all weights" if recipe.reward_peft is None else f"LoRA of rank {recipe.reward_peft.r}"
    lines = {
        "starts from": recipe.reward_base,
        "trained": "the head" if args.freeze_backbone else adapter,
        "pairs": f"{1 - args.eval_fraction:.0%} of the items, {args.num_train_epochs:g} epochs, "
        f"{args.per_device_train_batch_size} pairs per device and step, learning rate {args.learning_rate:g}",
        "folder": str(folder / (f"_{REWARD_FOLDER}" if number is None else REWARD_FOLDER)),
    }
    print_plan(lines, "\nPhase 2 of 3: the reward model")
    print_plan(
        rollout_lines(recipe, environment.roles),
        f"\nPhase 3 of 3: {recipe.reward.rl_algorithm} with the reward of the model",
    )

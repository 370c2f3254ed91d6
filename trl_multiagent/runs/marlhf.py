"""
MARLHF: collects preferences, trains a joint reward model on them, and trains the team with its reward. `marlhf` does
this once. `marlhf_iter` has the rounds of iterative MADPO, with a reward model in each.
"""

import dataclasses
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.model_reward import ModelRewardEnvironment
from trl_multiagent.environments.reward_models import JointRewardModel
from trl_multiagent.jobs.fingerprint import checksum_of_weights
from trl_multiagent.preferences.config import PreferenceConfig
from trl_multiagent.runs.models import check_models
from trl_multiagent.runs.plan import HEADING, print_plan, rollout_lines
from trl_multiagent.runs.preference_run import PreferenceRun
from trl_multiagent.runs.prepared import first_rows
from trl_multiagent.runs.reward_model import check_base, checked_args, summary, train_reward_model
from trl_multiagent.runs.run import end_on_wrong_input
from trl_multiagent.settings.algorithms import ALGORITHMS, RL_ALGORITHMS
from trl_multiagent.settings.derive import Settings, make_training_args
from trl_multiagent.settings.read import ConfigError, config_errors
from trl_multiagent.settings.schema import PEFT_DEFAULTS, RewardSettings
from trl_multiagent.team.load import build
from trl_multiagent.trainers.base.team_trainer import without_sharding
from trl_multiagent.trainers.joint_reward_config import JointRewardConfig
from trl_multiagent.trainers.joint_reward_trainer import SCALE_KEY
from trl_multiagent.trainers.reward_watch import RewardWatch


REWARD_FOLDER = "reward_model"  # in a round's folder; with an underscore in the run's folder, which is pushed
# Arguments of the team's trainer that the reward model's trainer shares: accelerate has one precision per process
SHARED = "seed bf16 fp16 deepspeed disable_tqdm gradient_checkpointing dataloader_pin_memory output_dir".split()


def run_marlhf(settings: Settings) -> None:
    """Runs MARLHF, or prints the plan. Wrong settings end the program."""
    with end_on_wrong_input(settings.prog):
        run = RewardRun(settings)
    run.start()


class RewardRun(PreferenceRun):
    """
    One run of MARLHF. Each round trains a reward model on its preferences, and then the team with the model's reward.
    """

    def __init__(self, settings: Settings):
        self.reward = settings.part(RewardSettings)
        super().__init__(settings)
        self.trained_with = self.reward.rl_algorithm
        self.reward_base = self.reward.reward_model_name or settings.model_list[0]
        check_models(f"{settings.algorithm}.reward_model_name", [self.reward_base], settings.task)
        self.reward_args = make_reward_args(settings, self.reward, self.prepared.training_args)
        check_base(self.reward_base, self.reward_args)
        self.reward_peft = make_reward_peft(settings.algorithm, self.reward)

    def training_args(self, settings: Settings) -> Any:
        classes = {name: ALGORITHMS[name].config_class() for name in RL_ALGORITHMS}
        fields = {name: {field.name for field in dataclasses.fields(cls)} for name, cls in classes.items()}
        used = fields[self.reward.rl_algorithm] | {field.name for field in dataclasses.fields(PreferenceConfig)}
        without_effect = set().union(*fields.values()) - used - {"num_iterations"}
        given = [f"{settings.algorithm}.{name}" for name in settings.arguments if name in without_effect]
        if given:
            reason = "because of `rl_algorithm`"
            settings.notes.append(f"these settings have no effect here, {reason}: {', '.join(given)}.")
        processed = {} if self.reward.process_model_reward else {"reward_scale": 1.0, "reward_shift": 0.0}
        return make_training_args(settings, classes[self.reward.rl_algorithm], **processed)

    @property
    def items_to_compare(self) -> Dataset:
        return first_rows(self.items, self.reward.preference_num_items)

    def collect(self, *args: Any) -> tuple[Dataset, dict[str, Any]]:
        self.say("Phase 1 of 3: preferences")
        preferences, numbers = super().collect(*args)
        self.say(f"{len(preferences)} preferences")
        return preferences, numbers

    def scoring(self, number: int) -> Environment:
        if number == 0 or self.prepared.arguments.get("preference_scoring_reward", "task") == "task":
            return self.environment
        return self.with_reward_of(self.reward_folder(number - 1), score_task=False)

    def reward_folder(self, number: int) -> Path:
        """Returns the folder of a round's reward model."""
        return self.round_folder(number) / (REWARD_FOLDER if self.in_rounds else f"_{REWARD_FOLDER}")

    def training_data(self, number: int, preferences: Dataset) -> dict[str, Any]:
        run, folder = self.prepared, self.reward_folder(number)
        self.say("\nPhase 2 of 3: the reward model")
        settings: Any = self.reward_args  # every training has a copy, with a DeepSpeed configuration of its own
        args: JointRewardConfig = dataclasses.replace(settings, output_dir=str(folder))
        model = build(self.reward_base, run.builders)
        with end_on_wrong_input(run.prog):
            facts = train_reward_model(model, args, preferences, list(self.roles), self.reward_peft)
        self.say(f"Reward model in {folder}: {summary(facts)}")
        self.stop_if_asked()
        self.say(f"\nPhase 3 of 3: {self.reward.rl_algorithm} with the reward of the model")
        environment = self.with_reward_of(folder, self.reward.score_task_reward)
        return {"environment": environment, "train_dataset": self.items, "callbacks": [RewardWatch()]}

    def with_reward_of(self, folder: Path, score_task: bool) -> Environment:
        """
        Returns the task with the reward of a saved model. Raises `ConfigError` if the model's files have changed.
        """
        with without_sharding(self.prepared.training_args), config_errors():
            reward = JointRewardModel(str(folder))
        return ModelRewardEnvironment(
            self.environment,
            reward,
            scale=reward.model.config.to_dict().get(SCALE_KEY),
            score_task=score_task,
            version=checksum_of_weights(reward.model.parameters()),
        )

    def print_plan(self) -> None:
        args, mode = self.reward_args, self.replay.preference_replay_mode
        rounds = f"\n\n{self.num_rounds} rounds of three phases, preference_replay_mode {mode}"
        print_plan({}, f"{HEADING}{rounds if self.in_rounds else ''}")
        print_plan(self.collection_lines(), "\nPhase 1 of 3: preferences")
        adapter = "all weights" if self.reward_peft is None else f"LoRA of rank {self.reward_peft.r}"
        lines = {
            "starts from": self.reward_base,
            "trained": "the head" if args.freeze_backbone else adapter,
            "pairs": f"{1 - args.eval_fraction:.0%} of the items, {args.num_train_epochs:g} epochs, "
            f"{args.per_device_train_batch_size} pairs per device and step, learning rate {args.learning_rate:g}",
            "folder": str(self.reward_folder(0)),
        }
        print_plan(lines, "\nPhase 2 of 3: the reward model")
        heading = f"\nPhase 3 of 3: {self.reward.rl_algorithm} with the reward of the model"
        print_plan(rollout_lines(self.prepared, self.roles), heading)


def make_reward_args(settings: Settings, reward: RewardSettings, args: Any) -> JointRewardConfig:
    """Makes the arguments of the reward model's trainer from the settings and `args`, those of the team's trainer."""
    section, more = settings.algorithm, reward.reward_training or {}
    same = "learning_rate num_train_epochs max_length freeze_backbone eval_fraction".split()
    values: dict[str, Any] = {
        **{name: getattr(reward, f"reward_{name}") for name in same},
        "per_device_train_batch_size": reward.reward_train_batch_size,
        "per_device_eval_batch_size": max(8, reward.reward_train_batch_size),
        "trust_remote_code": settings.agent_model.trust_remote_code,
        "logging_steps": 10,
    }
    if "output_dir" in more:
        raise ConfigError(f"`{section}.reward_training`: 'output_dir' cannot be set, it is in the folder of the run.")
    shared = {name: getattr(args, name) for name in SHARED}
    return checked_args(f"{section}.reward_training", values | shared | more)


def make_reward_peft(algorithm: str, reward: RewardSettings) -> LoraConfig | None:
    """Makes the adapter of the reward model. Raises `ConfigError` if PEFT refuses a value."""
    fields = reward.reward_peft
    if fields is None:
        return None
    if reward.reward_freeze_backbone:
        raise ConfigError(f"`{algorithm}.reward_freeze_backbone` trains the head: remove `{algorithm}.reward_peft`.")
    with config_errors(f"`{algorithm}.reward_peft`: ", (ValueError, TypeError)):
        return LoraConfig(**{**PEFT_DEFAULTS, **fields, "task_type": "SEQ_CLS"})

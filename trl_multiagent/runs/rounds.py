"""
MADPO and MARLHF, once or in rounds. The stages of a round:

1. Collect joint preferences with the team, and draw from these and earlier ones.
2. MARLHF: train a joint reward model on them.
3. Train the team on the preferences, or with the reward of the model.
4. In rounds: evaluate and save the team, with which the next round begins.

A run that is started again in its folder skips complete rounds and stages, and continues an interrupted one from its
last chunk or checkpoint.
"""

import copy
import dataclasses
import math
import shutil
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets
from peft import LoraConfig
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.reward_models import JointRewardModel, ModelRewardEnvironment
from trl_multiagent.folders import PREFERENCES_FILE, read_json
from trl_multiagent.hub import push_folder
from trl_multiagent.jobs.distributed import fail_together, is_asked_to_stop, start_processes
from trl_multiagent.jobs.fingerprint import checksum_of_weights
from trl_multiagent.jobs.signals import Stopped, end_on_signal
from trl_multiagent.jobs.stage import Stage
from trl_multiagent.preferences.collection import collect_preferences, load_preferences, seeded
from trl_multiagent.preferences.comparators import ROUND_FOLDER
from trl_multiagent.preferences.pairs import ReplayConfig, replay
from trl_multiagent.preferences.rows import CHOSEN_REWARD, ITEM_ID, REJECTED_REWARD, ROUND, text_columns
from trl_multiagent.runs.collection import check_comparator, cost, make_config
from trl_multiagent.runs.plan import agents, collaboration, count, print_plan, rollout_lines
from trl_multiagent.runs.prepared import (
    AUTO,
    NO_FOLDER,
    check_folder,
    check_run,
    check_team,
    first_rows,
    prepare_run,
    start_logging,
)
from trl_multiagent.runs.reward_model import checked_args, summary, train_reward_model
from trl_multiagent.runs.run import end_on_wrong_input, end_with_one_line
from trl_multiagent.runs.training import save_results, set_up_wandb, train_and_save, write_settings
from trl_multiagent.settings.algorithms import ALGORITHMS, ITERATIVE
from trl_multiagent.settings.derive import Settings, by_path, check_models, make_training_args
from trl_multiagent.settings.read import ConfigError, config_errors
from trl_multiagent.settings.schema import PEFT_DEFAULTS, RewardSettings
from trl_multiagent.team.load import build
from trl_multiagent.trainers.base.team_config import temporarily_set
from trl_multiagent.trainers.base.team_trainer import forget_engine, without_sharding
from trl_multiagent.trainers.joint_reward_config import JointRewardConfig


logger = logging.get_logger(__name__)

# In the folder of the run. Names with an underscore are not pushed
PREFERENCES_FOLDER, REWARD_FOLDER, ROUNDS_FOLDER = "_preferences", "_reward_model", "_rounds"
TEAMS_FOLDER = "teams"  # in `ROUNDS_FOLDER`: the team before each round
RESULTS_FILE = "results.json"  # of a round, written last
# Settings of the algorithm that may differ when a run is resumed
FREE_KEYS = "num_iterations logging_steps report_to disable_tqdm push_to_hub hub_model_id output_dir".split()
# Arguments of the team's trainer that the reward model's trainer shares: accelerate has one precision per process
SHARED = "seed bf16 fp16 deepspeed disable_tqdm gradient_checkpointing dataloader_pin_memory output_dir".split()


def run_preferences(settings: Settings) -> None:
    """Runs MADPO or MARLHF, or prints the plan. Wrong settings end the program."""
    with end_on_wrong_input(settings.prog):
        run = (RewardRun if settings.algorithm.startswith("marlhf") else PreferenceRun)(settings)
    run.start()


class PreferenceRun:
    """A run of MADPO: its settings, its rounds, and their folders. A wrong setting raises `ConfigError`."""

    environment: Environment
    roles: Sequence[str]
    given: Dataset | None = None  # the preferences that the user gave
    num_items: int | None = None  # preferences are collected for the first n items, or for all
    items: Dataset
    eval_items: Dataset | None

    def __init__(self, settings: Settings):
        algorithm, arguments, extras = settings.algorithm, settings.arguments, settings.extras
        self.trained_with, self.in_rounds = algorithm, algorithm in ITERATIVE
        self.num_rounds: int = arguments["num_iterations"] if self.in_rounds else 1
        self.preference_dataset: str | None = arguments.get("preference_dataset")
        if extras.resume_from_checkpoint in (True, AUTO):  # every run resumes; an early stage has no checkpoint yet
            if not settings.has_named_folder:
                raise ConfigError(NO_FOLDER)
            extras.resume_from_checkpoint = None
        if self.in_rounds and extras.resume_from_checkpoint is not None:
            advice = "the same RUN_ID or `output_dir` goes on by itself"
            raise ConfigError(f"`{algorithm}.resume_from_checkpoint` cannot be a folder: {advice}.")
        if self.in_rounds and self.preference_dataset is not None:
            raise ConfigError(f"`{algorithm}.preference_dataset`: every round collects its preferences. Remove it.")
        self.prepared = run = prepare_run(settings, self.training_args(settings))
        changes: dict[str, Any] = {"disable_tqdm": run.training_args.disable_tqdm}
        changes["output_dir"] = self.preference_dataset or str(self.preferences_folder(0))
        if self.in_rounds:
            given = arguments.get("policy_checkpoint_dir")
            self.teams_folder = Path(given or run.run_folder / ROUNDS_FOLDER / TEAMS_FOLDER)
            changes["policy_checkpoint_dir"] = str(self.teams_folder)
            check_folder(f"`{algorithm}.policy_checkpoint_dir`", self.teams_folder)
        self.preferences, self.replay = make_config(settings, **changes), settings.part(ReplayConfig)
        self.state = start_processes()
        advice = f"choose another folder, or set `{algorithm}.resume_changes: allow`"
        decisive = by_path(run.merged, "output", "wandb", *(f"{algorithm}.{name}" for name in FREE_KEYS))
        self.stage = Stage(run.run_folder, "run", decisive, self.state, advice=advice)

    # What MARLHF replaces

    def training_args(self, settings: Settings) -> Any:
        return make_training_args(settings)

    def scoring(self, number: int) -> Environment:
        """Returns the environment that scores the collected answers of a round."""
        return self.environment

    def training_data(self, number: int, preferences: Dataset) -> dict[str, Any]:
        """Returns the arguments of a round's trainer that depend on its preferences."""
        return {"environment": self.environment, "train_dataset": preferences}

    def print_plan(self) -> None:
        """Prints the plan, made without loading a model."""
        mode = self.replay.preference_replay_mode
        rounds = {"rounds": f"{self.num_rounds}, preference_replay_mode {mode}"} if self.in_rounds else {}
        print_plan({**rounds, **self.collection_lines(), **self.training_lines()})

    def training_lines(self) -> dict[str, Any]:
        """Returns the lines of a plan about the training."""
        run, args = self.prepared, self.prepared.training_args
        pairs = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        steps = f"max_steps {args.max_steps}" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
        return {
            "algorithm": f"{run.algorithm}, loss {' + '.join(args.loss_type)}, beta {args.beta:g}",
            **collaboration(run),
            "agents": f"{agents(run.model_names, self.roles)} ({run.form_in_words})",
            "training": f"{count(pairs, 'pair')} per optimizer step, {steps}, learning rate {args.learning_rate:g}",
            "evaluation": f"the task's reward on split {run.dataset.eval_split}, eval_strategy {args.eval_strategy}",
            "output folder": run.run_folder,
        }

    def collection_lines(self) -> dict[str, Any]:
        """Returns the lines of a plan about the preferences."""
        if self.preference_dataset is not None:
            return {"preferences": self.preference_dataset}
        return cost(
            self.preferences, self.environment, lambda: first_rows(self.prepared.load_datasets()[0], self.num_items)
        )

    # The run

    def start(self) -> None:
        """Runs the rounds that are not complete, or prints the plan. Wrong input ends the program."""
        run = self.prepared
        go_on = [] if run.has_named_folder else ["--output_dir", str(run.run_folder)]
        start_logging(run, run.training_args.disable_tqdm, self.state.is_main_process)
        run.introduce()
        with end_on_signal(run.prog, lambda: go_on), run.reservation:
            with end_on_wrong_input(run.prog):
                self.environment = run.make_environment()
                self.roles = self.environment.roles
                check_team(run, self.roles)
                if self.preference_dataset is None:
                    check_comparator(self.preferences)
                else:
                    self.given = load_preferences(self.preference_dataset, self.roles)
                if run.dry_run:
                    return self.print_plan()
                if self.complete_rounds() and run.training_args.resume_changes != "allow":
                    self.stage.check()
                self.items, self.eval_items = run.load_datasets()
            check_run(run, self.environment, self.items)
            with end_with_one_line(run.prog):
                trainer = self.train()
            if trainer is not None:
                trainer.accelerator.wait_for_everyone()
                trainer.accelerator.end_training()

    def complete_rounds(self) -> list[dict[str, Any]]:
        """Returns the results of the complete rounds. Raises `ValueError` if a file is damaged."""
        results: list[dict[str, Any]] = []
        while len(results) < self.num_rounds and self.stage.has(self.results_file(len(results))):
            results.append(self.stage.result(self.results_file(len(results))))
        return results

    def train(self) -> Any:
        """
        Runs the rounds that are not complete, and saves the last team. Returns its trainer; `None` if all rounds were
        complete.
        """
        run = self.prepared
        if self.state.is_main_process:
            self.stage.begin()
            write_settings(run)
        set_up_wandb(run.wandb)
        results, trainer = self.complete_rounds(), None
        for number in range(len(results), self.num_rounds):
            self.stop_if_asked()
            if self.in_rounds:
                self.say(f"\nRound {number + 1} of {self.num_rounds}")
            trainer, numbers = self.train_round(number, results)
            results.append(numbers)
            if self.in_rounds and number == self.num_rounds - 1:  # before the round counts as complete
                self.save_last(trainer)
            self.stage.save_result(self.results_file(number), numbers)
        if trainer is None:
            self.say(f"The run in {run.run_folder} is complete.")
        return trainer

    def train_round(self, number: int, results: list[dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
        """
        Runs the stages of a round. `results`: those of earlier rounds. Returns the team's trainer, and the results.
        """
        run = self.prepared
        with end_on_wrong_input(run.prog):
            source = self.team_before(number)
            preferences, collection = self.collect(number, source)
            chosen = self.replayed(number, preferences) if self.in_rounds else preferences
            if len(chosen) == 0:
                where = f" The team before this round is in {source}." if source else ""
                problem = "has no pairs: all answers to an item have the same reward"
                raise ConfigError(f"The collection in {self.preferences_folder(number)} {problem}.{where}")
            data = self.training_data(number, chosen)
            trainer, checkpoint = self.make_trainer(number, data, source)
        if not self.in_rounds:
            run.resume_from_checkpoint = checkpoint
            train_and_save(run, trainer)
            facts = {"collection": collection, "env_step": trainer.env_step, "steps": trainer.state.global_step}
            return trainer, facts
        if results and checkpoint is None:
            trainer.env_step = results[-1]["env_step"]
        collections = [*(result["collection"] for result in results), collection]
        facts = {
            "current_iteration": number + 1,
            "current_preference_pairs": len(preferences),
            "total_preference_pairs": sum(x["pairs"] for x in collections),
            "train_preference_pairs": len(chosen),
            "candidates_scored": sum(x["candidates_scored"] for x in collections),
        }
        trainer.add_callback(RoundLog(trainer, {f"iter/{name}": value for name, value in facts.items()}))
        trainer.train(resume_from_checkpoint=checkpoint)
        evaluation = self.evaluate(trainer)
        counts = (
            f"{collection['candidates_scored']} answers scored, {collection['pairs']} pairs, {len(chosen)} trained on"
        )
        reward = math.nan if evaluation is None else evaluation["reward"]
        self.say(f"Round {number + 1}: {counts}, held-out reward {reward:.3f}")
        self.save_team(number + 1, lambda path: trainer.save_model(path, _internal_call=True))
        return trainer, {
            "round": number,
            "collection": collection,
            "iter": facts,
            "env_step": trainer.env_step,
            "eval": evaluation,
            "steps": trainer.state.global_step,
            "log_history": trainer.state.log_history,
        }

    def collect(self, number: int, source: str | None) -> tuple[Dataset, dict[str, Any]]:
        """
        Collects the preferences of a round with the team in `source` or the base. Returns them and the numbers of the
        collection.
        """
        if self.given is not None:
            return self.given, {}
        run, folder = self.prepared, self.preferences_folder(number)
        self.say(f"Collecting preferences in {folder}")
        comparator = build(self.preferences.comparator_model_name, run.builders)
        config = dataclasses.replace(self.preferences, output_dir=str(folder), comparator_model_name=comparator)
        environment, items = self.scoring(number), first_rows(self.items, self.num_items)
        with without_sharding(run.training_args):
            team = run.load_team(self.roles, source)
            team = team if run.agent_model.is_quantized else team.to(self.state.device)
            preferences = collect_preferences(team, environment, items, config, round=number)
        return preferences, read_json(folder / PREFERENCES_FILE)["numbers"]

    def replayed(self, number: int, preferences: Dataset) -> Dataset:
        """Returns the preferences that a round trains on."""
        folders = [self.preferences_folder(k) for k in range(number)]
        rounds = [*(load_preferences(str(folder), self.roles) for folder in folders), preferences]
        drawn = replay([len(dataset) for dataset in rounds], self.replay, self.preferences.seed)
        if not drawn:
            return preferences.select([])
        columns = [column for role in self.roles for column in text_columns(role)]
        columns += [CHOSEN_REWARD, REJECTED_REWARD, ITEM_ID, ROUND]
        starts = [0, *accumulate(map(len, rounds))]
        everything = concatenate_datasets([dataset.select_columns(columns) for dataset in rounds if len(dataset) > 0])
        return everything.select([starts[k] + position for k, position in drawn])

    def make_trainer(self, number: int, data: dict[str, Any], source: str | None) -> tuple[Any, str | None]:
        """
        Makes the trainer of a round, and finds the checkpoint to resume from, which may be that of the last step.
        """
        run, folder, args = self.prepared, self.round_folder(number), self.prepared.training_args
        if self.in_rounds:
            args = copy.copy(args)
            args.output_dir, args.push_to_hub = str(folder), False
        checkpoint = run.resume_from_checkpoint or (get_last_checkpoint(folder) if folder.is_dir() else None)
        forget_engine()
        team = run.load_team(self.roles, source)
        trainer_class: Any = ALGORITHMS[self.trained_with].trainer_class()
        return trainer_class(team=team, args=args, eval_dataset=self.eval_items, **data), checkpoint

    def evaluate(self, trainer: Any) -> dict[str, float] | None:
        """
        Plays the evaluation items, with the same random numbers in every round. Returns `None` if there are no such
        items.
        """
        if self.eval_items is None:
            return None
        with seeded(trainer.args.seed):
            metrics = trainer.evaluate()
        return {name.removeprefix("eval_"): value for name, value in metrics.items()}

    # Folders

    def round_folder(self, number: int) -> Path:
        folder = self.prepared.run_folder
        return folder / ROUNDS_FOLDER / ROUND_FOLDER.format(number) if self.in_rounds else folder

    def part_of_round(self, number: int, name: str) -> Path:
        """Returns a folder of a round. Only in the folder of the run, which is pushed, its name has an underscore."""
        return self.round_folder(number) / (name.removeprefix("_") if self.in_rounds else name)

    def preferences_folder(self, number: int) -> Path:
        return self.part_of_round(number, PREFERENCES_FOLDER)

    def results_file(self, number: int) -> str:
        """Returns the name of the results of a round, the part of the stage that a round writes last."""
        return str((self.round_folder(number) / RESULTS_FILE).relative_to(self.prepared.run_folder))

    def team_before(self, number: int) -> str | None:
        """
        Returns the folder of the team before a round; `None` if it is the base. Saves the base if a comparator needs
        it.
        """
        if number > 0:
            return str(self.teams_folder / ROUND_FOLDER.format(number))
        if self.in_rounds and self.preferences.comparator_policy == "history":
            with without_sharding(self.prepared.training_args):
                team = self.prepared.load_team(self.roles)
            self.save_team(0, lambda path: team.save_pretrained(path) if self.state.is_main_process else None)
        return None

    def save_team(self, number: int, save: Callable[[str], None]) -> None:
        """
        Saves the team before round `number` by calling `save` with a folder. The final folder appears atomically.
        """
        folder = self.teams_folder / ROUND_FOLDER.format(number)
        unfinished = folder.with_name(f"_{folder.name}")
        with fail_together(self.state):
            save(str(unfinished))
        with fail_together(self.state):
            if self.state.is_main_process:
                shutil.rmtree(folder, ignore_errors=True)
                unfinished.rename(folder)

    def save_last(self, trainer: Any) -> None:
        """Saves the last team in the folder of the run, and pushes it if `push_to_hub` is set."""
        run, args = self.prepared, self.prepared.training_args
        with (
            temporarily_set(trainer.args, output_dir=str(run.run_folder)),
            temporarily_set(args, push_to_hub=False),
        ):
            save_results(run, trainer)
        if args.push_to_hub and trainer.is_world_process_zero():
            name = args.hub_model_id or run.run_folder.absolute().name
            target = {"private": args.hub_private_repo, "token": args.hub_token, "revision": args.hub_revision}
            push_folder(run.team_folder, name, **target)

    def stop_if_asked(self) -> None:
        """Ends the program if a signal has asked for it in the last step of a training."""
        if is_asked_to_stop(self.state):
            raise Stopped("between two rounds")

    def say(self, text: str) -> None:
        if self.state.is_main_process:
            print(text, flush=True)


class RewardRun(PreferenceRun):
    """A run of MARLHF: a round trains a reward model on its preferences, and then the team with the model's reward."""

    def __init__(self, settings: Settings):
        self.reward = settings.part(RewardSettings)
        super().__init__(settings)
        self.trained_with, self.num_items = self.reward.rl_algorithm, self.reward.preference_num_items
        self.reward_base = self.reward.reward_model_name or settings.model_list[0]
        check_models(f"{settings.algorithm}.reward_model_name", [self.reward_base], settings.task.models)
        self.reward_args = make_reward_args(settings, self.reward, self.prepared.training_args)
        self.reward_peft = make_reward_peft(settings.algorithm, self.reward)

    def training_args(self, settings: Settings) -> Any:
        processed = {} if self.reward.process_model_reward else {"reward_scale": 1.0, "reward_shift": 0.0}
        return make_training_args(settings, ALGORITHMS[self.reward.rl_algorithm].config_class(), **processed)

    def scoring(self, number: int) -> Environment:
        if number == 0 or self.prepared.arguments.get("preference_scoring_reward", "task") == "task":
            return self.environment
        return self.with_reward_of(self.part_of_round(number - 1, REWARD_FOLDER), score_task=False)

    def training_data(self, number: int, preferences: Dataset) -> dict[str, Any]:
        run, folder = self.prepared, self.part_of_round(number, REWARD_FOLDER)
        self.say(f"\nTraining the reward model on {len(preferences)} preferences")
        settings: Any = self.reward_args  # every training has a copy with its own DeepSpeed configuration
        args: JointRewardConfig = dataclasses.replace(settings, output_dir=str(folder))
        model = build(self.reward_base, run.builders)
        facts = train_reward_model(model, args, preferences, list(self.roles), self.reward_peft)
        self.say(f"Reward model in {folder}: {summary(facts)}")
        self.stop_if_asked()
        self.say(f"\nTraining the team: {self.reward.rl_algorithm} with the reward of the model")
        environment = self.with_reward_of(folder, self.reward.score_task_reward)
        return {"environment": environment, "train_dataset": self.items}

    def with_reward_of(self, folder: Path, score_task: bool) -> Environment:
        """Returns the task with the reward of a saved model."""
        with without_sharding(self.prepared.training_args), config_errors():
            reward = JointRewardModel(str(folder))
        return ModelRewardEnvironment(
            self.environment, reward, score_task, checksum_of_weights(reward.model.parameters())
        )

    def training_lines(self) -> dict[str, Any]:
        args = self.reward_args
        adapter = "all weights" if self.reward_peft is None else f"LoRA of rank {self.reward_peft.r}"
        trained = "the head" if args.freeze_backbone else adapter
        pairs = (
            f"{1 - args.eval_fraction:.0%} of the items, {args.num_train_epochs:g} epochs, "
            f"{args.per_device_train_batch_size} pairs per device and step, learning rate {args.learning_rate:g}"
        )
        model = {"reward model": f"starts from {self.reward_base}, trains {trained}", "reward training": pairs}
        algorithm = {
            "algorithm": f"{self.prepared.algorithm}, {self.reward.rl_algorithm} with the reward of the model"
        }
        return {**model, **rollout_lines(self.prepared, self.roles), **algorithm}


class RoundLog(TrainerCallback):
    """Logs facts about a round when its training begins."""

    def __init__(self, trainer: Any, facts: dict[str, float]):
        self.trainer, self.facts = trainer, facts

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:  # a resumed training has them in its log
            self.trainer.log(dict(self.facts))


def make_reward_args(settings: Settings, reward: RewardSettings, args: Any) -> JointRewardConfig:
    """Makes the arguments of the reward model's trainer. `args`: the arguments of the team's trainer."""
    section, more = settings.algorithm, reward.reward_training or {}
    same = "learning_rate num_train_epochs max_length freeze_backbone eval_fraction".split()
    if "output_dir" in more:
        raise ConfigError(f"`{section}.reward_training`: 'output_dir' cannot be set, it is in the folder of the run.")
    values: dict[str, Any] = {
        **{name: getattr(reward, f"reward_{name}") for name in same},
        "per_device_train_batch_size": reward.reward_train_batch_size,
        "per_device_eval_batch_size": max(8, reward.reward_train_batch_size),
        "trust_remote_code": settings.agent_model.trust_remote_code,
        "logging_steps": 10,
        **{name: getattr(args, name) for name in SHARED},
        **more,
    }
    return checked_args(f"{section}.reward_training", values)


def make_reward_peft(algorithm: str, reward: RewardSettings) -> LoraConfig | None:
    """Makes the adapter of the reward model. Raises `ConfigError` if PEFT refuses a value."""
    fields = reward.reward_peft
    if fields is None:
        return None
    if reward.reward_freeze_backbone:
        raise ConfigError(f"`{algorithm}.reward_freeze_backbone` trains the head: remove `{algorithm}.reward_peft`.")
    with config_errors(f"`{algorithm}.reward_peft`: ", (ValueError, TypeError)):
        return LoraConfig(**{**PEFT_DEFAULTS, **fields})

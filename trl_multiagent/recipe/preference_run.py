"""
The phases of the recipes `madpo` and `madpo_iter`: rounds of collecting preferences and training on them.

A run is continued when it is started again in the same folder. Complete phases are skipped; an interrupted one
continues from its last chunk or checkpoint. MARLHF has the same rounds, with a reward model in between, see `marlhf.py`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from datasets import Dataset, concatenate_datasets
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import unset_hf_deepspeed_config
from transformers.trainer_utils import get_last_checkpoint

from trl_multiagent.folders import PREFERENCES_FILE, RECIPE_FILE, TEAM_FILE, write_text
from trl_multiagent.hub.push import push_folder
from trl_multiagent.jobs.identity import differences
from trl_multiagent.jobs.processes import fail_together, is_asked_to_stop, start_processes
from trl_multiagent.jobs.stopping import end_on_signal
from trl_multiagent.preferences.collection import collect_preferences, seeded
from trl_multiagent.preferences.comparators import ROUND_FOLDER
from trl_multiagent.preferences.replay import replay
from trl_multiagent.preferences.rows import CHOSEN_REWARD, ITEM_ID, REJECTED_REWARD, ROUND, text_columns
from trl_multiagent.preferences.sources import load_preferences
from trl_multiagent.recipe.checks import check_run, check_team
from trl_multiagent.recipe.collection import check_comparator
from trl_multiagent.recipe.plan import print_plan
from trl_multiagent.recipe.preference_recipe import (
    RESULTS_FILE,
    ROUNDS_FOLDER,
    PreferenceRecipe,
    pair_lines,
    preference_fields,
)
from trl_multiagent.recipe.run import end_on_wrong_input, end_with_one_line
from trl_multiagent.recipe.saving import save_results, set_up_wandb, show_progress, train_and_save
from trl_multiagent.report.tables import text_table
from trl_multiagent.settings.derive import Settings, make_training_args
from trl_multiagent.settings.read import ConfigError, fail
from trl_multiagent.team.load import LoadError, build
from trl_multiagent.trainers.base.checkpoint_files import read_checkpoint
from trl_multiagent.trainers.base.distribution import forget_engine
from trl_multiagent.trainers.base.run_settings import check_changes
from trl_multiagent.trainers.base.team_config import temporarily_set


if TYPE_CHECKING:
    from trl_multiagent.environments.base import Environment


BEFORE_FILE = f"{ROUNDS_FOLDER}/{ROUND_FOLDER.format(0)}/before.json"  # the task's reward of the base


def run_preferences(settings: Settings, dry_run: bool, prog: str) -> None:
    """
    Collects preferences and trains a team on them, or prints the plan. Wrong settings end the program.

    Args:
        settings ([`~trl_multiagent.settings.derive.Settings`]): The settings.
        dry_run (`bool`): Whether to print the plan only.
        prog (`str`): Name of the program in messages.
    """
    with end_on_wrong_input(prog):
        recipe = PreferenceRecipe(**preference_fields(settings, make_training_args(settings), dry_run))
    recipe.prog = prog
    run_phases(recipe, PreferenceRun, lambda environment: print_plan(pair_lines(recipe, environment)))


def run_phases(
    recipe: PreferenceRecipe,
    run_class: type[PreferenceRun],
    plan: Callable[[Environment], None],
) -> None:
    """
    Runs the phases that are not complete, or prints the plan if `--dry_run` is given. Wrong input ends the program.

    Args:
        recipe ([`PreferenceRecipe`]): The settings.
        run_class (`type[PreferenceRun]`): The phases.
        plan (`Callable`): `(environment) -> None`; prints the plan.
    """
    recipe.start_logging()
    if not recipe.dry_run:
        recipe.introduce()
    with end_on_signal(recipe.prog, recipe.arguments_to_go_on), recipe.reservation:
        run_in_folder(recipe, run_class, plan)


def run_in_folder(
    recipe: PreferenceRecipe, run_class: type[PreferenceRun], plan: Callable[[Environment], None]
) -> None:
    """The work of [`run_phases`]."""
    with end_on_wrong_input(recipe.prog):
        environment = recipe.make_environment()
        check_team(recipe, environment.roles)
        if recipe.given_preferences is None:
            given = None
            check_comparator(recipe.preferences)
        else:
            given = load_preferences(recipe.given_preferences, environment.roles)
        if recipe.dry_run:
            return plan(environment)
        recipe.check_run_folder()
        items, eval_items = recipe.load_datasets()
    check_run(recipe, environment, items)
    run = run_class(recipe, environment, items, eval_items)
    try:
        with end_with_one_line(recipe.prog):
            number = recipe.num_iterations
            trainer = run.train_once(given) if number is None else run.train_rounds(number)
    except (NoPairsError, ConfigError, LoadError) as error:
        fail(recipe.prog, error)
    if trainer is not None:
        trainer.accelerator.wait_for_everyone()
        trainer.accelerator.end_training()


class NoPairsError(RuntimeError):
    """A collection has no pairs, so there is nothing to train on."""


class PreferenceRun:
    """
    One run: its phases, and the folders that they write.

    Args:
        recipe ([`PreferenceRecipe`]): The settings.
        environment ([`~trl_multiagent.environments.Environment`]): The task's environment.
        items ([`~datasets.Dataset`]): The items for which preferences are collected.
        eval_items ([`~datasets.Dataset`], *optional*): The items to evaluate on, by the task's reward.
    """

    def __init__(self, recipe: PreferenceRecipe, environment: Environment, items: Dataset, eval_items: Dataset | None):
        self.recipe, self.environment = recipe, environment
        self.items, self.eval_items = items, eval_items  # to train and to evaluate on
        self.items_to_compare = items  # those that preferences are collected for
        self.roles = environment.roles
        self.state = start_processes()

    # One round

    def train_once(self, given: Dataset | None = None) -> Any:
        """
        Collects preferences, unless the user gave some, and trains on them. `None` if that was done before.

        Args:
            given ([`~datasets.Dataset`], *optional*): The preferences that the user gave, checked.
        """
        recipe = self.recipe
        folder = recipe.run_folder
        if recipe.stage.has(RESULTS_FILE):
            self.say(f"The run in {folder} is complete.")
            return None
        self.write_settings()
        if given is None:
            preferences, numbers = self.collect(0, Path(recipe.preferences.output_dir), None, self.environment)
        else:
            preferences, numbers = given, {}
        if len(preferences) == 0:
            raise NoPairsError(no_pairs(recipe.preferences.output_dir))
        trainer, checkpoint = self.make_trainer(preferences, folder, None, recipe.resume_from_checkpoint)
        recipe.resume_from_checkpoint = checkpoint
        train_and_save(recipe, trainer)
        results = {"collection": numbers, "env_step": trainer.env_step, "steps": trainer.state.global_step}
        recipe.stage.save_result(RESULTS_FILE, results)
        return trainer

    # Several rounds

    def train_rounds(self, number: int) -> Any:
        """Runs the rounds that are not complete, and saves the last team. `None` if all of them were complete before."""
        recipe, stage = self.recipe, self.recipe.stage
        self.write_settings()
        set_up_wandb(recipe.wandb)
        results: list[dict[str, Any]] = []
        trainer = None
        for k in range(number):
            self.stop_if_asked()
            part = f"{ROUNDS_FOLDER}/{ROUND_FOLDER.format(k)}/{RESULTS_FILE}"
            if stage.has(part):
                results.append(stage.result(part))
                continue
            self.say(f"\nRound {k + 1} of {number}")
            trainer, numbers = self.train_round(k, recipe.rounds_folder / ROUND_FOLDER.format(k), results)
            results.append(numbers)
            if k == number - 1:  # before the round counts as complete
                self.save_last(trainer, results)
            stage.save_result(part, numbers)
        self.say(table(results))
        if trainer is None:
            self.say(f"The run in {recipe.run_folder} is complete.")
        return trainer

    def train_round(self, number: int, folder: Path, results: list[dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
        """
        Collects preferences with the team as it is, trains it on them and on some of earlier rounds, and saves it.

        Args:
            number (`int`): Number of the round, from 0.
            folder (`Path`): Folder of the round.
            results (`list[dict]`): What the earlier rounds returned.

        Returns:
            `tuple[Trainer, dict]`: The trainer, and the results of the round.

        Raises:
            NoPairsError: there are no preferences to train on.
        """
        stage, source = self.recipe.stage, self.team_before(number)
        preferences, collection = self.collect(number, folder / "preferences", source, self.scoring(number))
        chosen = self.replayed(number, preferences)
        if len(chosen) == 0:
            raise NoPairsError(
                no_pairs(folder / "preferences") + (f" The team before this round is in {source}." if source else "")
            )
        total = sum(result["collection"]["pairs"] for result in results) + len(preferences)
        trainer, checkpoint = self.make_trainer(chosen, folder, source)
        if results:
            before = results[-1].get("eval")
        elif stage.has(BEFORE_FILE):
            before = stage.result(BEFORE_FILE)
        else:
            before = self.evaluate(trainer)
            stage.save_result(BEFORE_FILE, before)
        if results and checkpoint is None:
            trainer.env_step = results[-1]["env_step"]
        facts = {"current_iteration": number + 1, "current_preference_pairs": len(preferences)}
        facts |= {"total_preference_pairs": total, "train_preference_pairs": len(chosen)}
        facts["candidates_scored"] = collection["candidates_scored"] + sum(
            result["collection"]["candidates_scored"] for result in results
        )
        trainer.add_callback(RoundLog(trainer, {f"iter/{name}": value for name, value in facts.items()}))
        show_progress(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        after = self.evaluate(trainer)
        self.save_team(number + 1, lambda path: trainer.save_model(path, _internal_call=True))
        numbers = {"round": number, "collection": collection, "iter": facts, "env_step": trainer.env_step}
        numbers |= {"eval_before": before, "eval": after, "steps": trainer.state.global_step}
        return trainer, {**numbers, "log_history": trainer.state.log_history}

    def team_before(self, number: int) -> str | None:
        """The folder of the team before a round; `None` if it is the base, which needs none."""
        recipe = self.recipe
        folder = recipe.teams_folder / ROUND_FOLDER.format(number)
        if number > 0:
            return str(folder)
        if recipe.preferences.comparator_policy == "history" and not (folder / TEAM_FILE).is_file():
            with without_sharding(recipe.training_args):
                team = recipe.load_team(self.roles)
            self.save_team(0, lambda path: team.save_pretrained(path) if self.state.is_main_process else None)
        return None

    def save_team(self, number: int, save: Callable[[str], None]) -> None:
        """Saves the team before round `number` with a function of its folder, which is created atomically."""
        folder = self.recipe.teams_folder / ROUND_FOLDER.format(number)
        unfinished = folder.with_name(f"_{folder.name}")
        with fail_together(self.state):
            save(str(unfinished))
        with fail_together(self.state):
            if self.state.is_main_process:
                shutil.rmtree(folder, ignore_errors=True)
                unfinished.rename(folder)

    def replayed(self, number: int, preferences: Dataset) -> Dataset:
        """The preferences that a round trains on."""
        recipe = self.recipe
        folders = [recipe.rounds_folder / ROUND_FOLDER.format(k) / "preferences" for k in range(number)]
        rounds = [*(Dataset.load_from_disk(str(folder)) for folder in folders), preferences]
        drawn = replay([len(one) for one in rounds], recipe.replay, recipe.preferences.seed)
        columns = [column for role in self.roles for column in text_columns(role)]
        columns += [CHOSEN_REWARD, REJECTED_REWARD, ITEM_ID, ROUND]
        starts = [sum(len(one) for one in rounds[:k]) for k in range(len(rounds))]
        if not drawn:
            return preferences.select([])
        everything = concatenate_datasets([one.select_columns(columns) for one in rounds if len(one) > 0])
        return everything.select([starts[k] + position for k, position in drawn])

    def save_last(self, trainer: Any, results: list[dict[str, Any]]) -> None:
        """Saves the last team with a card that shows the logs of all rounds, and pushes it if the settings say so."""
        recipe, args = self.recipe, self.recipe.training_args
        history = []
        for k, result in enumerate(results):
            offset = sum(other["steps"] for other in results[:k])
            history += [{**entry, "step": entry["step"] + offset} for entry in result["log_history"]]
        with (
            temporarily_set(trainer.args, output_dir=str(recipe.run_folder), push_to_hub=False),
            temporarily_set(trainer.state, log_history=history),
            temporarily_set(recipe.training_args, push_to_hub=False),
        ):
            save_results(recipe, trainer)
        if args.push_to_hub and trainer.is_world_process_zero():
            name = args.hub_model_id or recipe.run_folder.absolute().name
            push_folder(
                recipe.team_folder,
                name,
                private=args.hub_private_repo,
                token=args.hub_token,
                revision=args.hub_revision,
            )

    # Phases

    def scoring(self, number: int) -> Environment:
        """The environment that scores the answers of a round."""
        return self.environment

    def collect(
        self, number: int, folder: Path, source: str | None, environment: Environment
    ) -> tuple[Dataset, dict[str, Any]]:
        """
        Collects the preferences of a round, or loads them if they are complete.

        Args:
            number (`int`): Number of the round, from 0.
            folder (`Path`): Folder of the collection.
            source (`str`, *optional*): Folder of the team; by default the base.
            environment ([`~trl_multiagent.environments.Environment`]): What scores the answers.

        Returns:
            `tuple[Dataset, dict]`: The preferences, and what was sampled for them.
        """
        recipe = self.recipe
        comparator = build(recipe.preferences.comparator_model_name, recipe.task.models)
        config = dataclasses.replace(recipe.preferences, output_dir=str(folder), comparator_model_name=comparator)
        with without_sharding(recipe.training_args):
            team = recipe.load_team(self.roles, source)
            team = team if recipe.agent_model.is_quantized else team.to(self.state.device)
            with end_on_wrong_input(recipe.prog):
                preferences = collect_preferences(team, environment, self.items_to_compare, config, round=number)
        numbers = json.loads((folder / PREFERENCES_FILE).read_text())["numbers"]
        return preferences, numbers

    def training_data(self, preferences: Dataset, folder: Path) -> tuple[Environment, Dataset]:
        """
        What the team is trained with.

        Args:
            preferences ([`~datasets.Dataset`]): The preferences of a round.
            folder (`Path`): Folder of the round.

        Returns:
            `tuple[Environment, Dataset]`: The environment and the training set of the trainer.
        """
        return self.environment, preferences

    def make_trainer(
        self, preferences: Dataset, folder: Path, source: str | None, checkpoint: str | None = None
    ) -> tuple[Any, str | None]:
        """
        Makes the trainer of a round, and finds the checkpoint from which it continues, which may be that of the last step.
        """
        recipe = self.recipe
        environment, rows = self.training_data(preferences, folder)
        args = recipe.training_args
        if folder != recipe.run_folder:
            args = copy.copy(args)
            args.output_dir, args.push_to_hub = str(folder), False
        if checkpoint is None and folder.is_dir():
            checkpoint = get_last_checkpoint(str(folder))
        forget_engine()
        with end_on_wrong_input(recipe.prog):
            trainer = recipe.trainer_class(  # rows may not fit the tokenizers or `max_length`
                team=recipe.load_team(self.roles, source),
                environment=environment,
                args=args,
                train_dataset=rows,
                eval_dataset=self.eval_items,
                callbacks=self.callbacks(),
            )
            trainer.may_be_complete = True
            if checkpoint is not None:
                changes = differences(read_checkpoint(checkpoint)["settings"], trainer._run_settings())
                check_changes(checkpoint, changes, args)
        return trainer, checkpoint

    def callbacks(self) -> list[TrainerCallback]:
        return []

    def evaluate(self, trainer: Any) -> dict[str, float] | None:
        """Plays the evaluation items, with the same random numbers in every round. `None` if there are no such items."""
        if self.eval_items is None:
            return None
        with seeded(trainer.args.seed, trainer.accelerator.device):
            metrics = trainer.evaluate()
        return {name.removeprefix("eval_"): value for name, value in metrics.items()}

    # Files

    def write_settings(self) -> None:
        if self.state.is_main_process:
            self.recipe.stage.begin()
            write_text(self.recipe.run_folder / RECIPE_FILE, yaml.safe_dump(self.recipe.merged, sort_keys=False))

    def stop_if_asked(self) -> None:
        """Ends the program if a signal has asked for it in the last step of a training."""
        if is_asked_to_stop(self.state):
            raise KeyboardInterrupt

    def say(self, text: str) -> None:
        if self.state.is_main_process:
            print(text, flush=True)


class RoundLog(TrainerCallback):
    """Logs facts about a round when its training begins."""

    def __init__(self, trainer: Any, facts: dict[str, float]):
        self.trainer, self.facts = trainer, facts

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == 0:  # a training that goes on has them in its log
            self.trainer.log(dict(self.facts))


def no_pairs(folder: str | Path) -> str:
    """The message about a collection without pairs."""
    return (
        f"The collection in {folder} has no pairs: all answers to an item have the same reward, so there is nothing to "
        "learn from. Sample more candidates or at a higher temperature, or start from another team."
    )


@contextlib.contextmanager
def without_sharding(args: TrainingArguments) -> Iterator[None]:
    """Inside, models are loaded whole, even if the trainer shards them (ZeRO-3): a collection samples on every process alone."""
    plugin = args.deepspeed_plugin
    if (
        plugin is not None
    ):  # transformers shards the models that it loads while a configuration of ZeRO-3 is registered
        unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if plugin is not None:
            plugin.set_deepspeed_weakref()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(results: list[dict[str, Any]]) -> str:
    """The rounds of a run as a table."""
    rows = [["round", "scored", "pairs", "trained on", "sampled reward", "held-out reward"]]
    for result in results:
        held_out = "" if result["eval"] is None else f"{result['eval']['reward']:.3f}"
        facts, collection = result["iter"], result["collection"]
        counts = (
            result["round"] + 1,
            collection["candidates_scored"],
            collection["pairs"],
            facts["train_preference_pairs"],
        )
        rows.append([*map(str, counts), f"{collection['mean_reward']:.3f}", held_out])
    before = results[0]["eval_before"] if results else None
    start = "" if before is None else f"Held-out reward before: {before['reward']:.3f}\n"
    return start + "\n".join(text_table(rows))

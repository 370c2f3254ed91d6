"""
The recipes `madpo` and `madpo_iter`: rounds of collecting preferences and training on them. `madpo` has one round, in
the folder of the run. A run that is started again in the same folder skips complete rounds, and continues an
interrupted one from its last chunk or checkpoint. MARLHF has the same rounds, with a reward model in between, see
`marlhf.py`.
"""

import copy
import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, load_from_disk
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from trl_multiagent.environments.base import Environment
from trl_multiagent.folders import PREFERENCES_FILE, TEAM_FILE, is_collection, read_json
from trl_multiagent.hub import push_folder
from trl_multiagent.jobs.distributed import fail_together, is_asked_to_stop, start_processes
from trl_multiagent.jobs.signals import Stopped, end_on_signal
from trl_multiagent.jobs.stage import Stage
from trl_multiagent.preferences.collection import collect_preferences, seeded
from trl_multiagent.preferences.comparators import ROUND_FOLDER
from trl_multiagent.preferences.replay import ReplayConfig, replay
from trl_multiagent.preferences.rows import CHOSEN_REWARD, ITEM_ID, REJECTED_REWARD, ROUND, text_columns
from trl_multiagent.preferences.sources import load_preferences
from trl_multiagent.report.tables import text_table
from trl_multiagent.runs.collection import check_comparator, cost, make_config
from trl_multiagent.runs.folders import AUTO, NO_FOLDER, check_folder
from trl_multiagent.runs.plan import agents, collaboration, count, print_plan
from trl_multiagent.runs.prepared import check_run, check_team, prepare_run, start_logging
from trl_multiagent.runs.run import end_on_wrong_input, end_with_one_line
from trl_multiagent.runs.training import save_results, set_up_wandb, show_progress, train_and_save, write_settings
from trl_multiagent.settings.algorithms import ALGORITHMS, ITERATIVE
from trl_multiagent.settings.derive import Settings, make_training_args
from trl_multiagent.settings.read import ConfigError, fail
from trl_multiagent.team.load import LoadError, build
from trl_multiagent.trainers.base.checkpoints import check_changes, read_checkpoint
from trl_multiagent.trainers.base.team_config import temporarily_set
from trl_multiagent.trainers.base.team_trainer import forget_engine, without_sharding


# In the folder of the run. Names with an underscore are not pushed
PREFERENCES_FOLDER = "_preferences"
ROUNDS_FOLDER = "_rounds"
TEAMS_FOLDER = "teams"  # in `ROUNDS_FOLDER`: the team before each round
RESULTS_FILE = "results.json"  # of a round, written last
BEFORE_FILE = f"{ROUNDS_FOLDER}/{ROUND_FOLDER.format(0)}/before.json"  # the task's reward of the base
# Settings that may differ when a run is resumed, by section
FREE_SECTIONS = ("output", "wandb")
FREE_KEYS = "num_iterations logging_steps report_to disable_tqdm push_to_hub hub_model_id output_dir".split()


def run_preferences(settings: Settings) -> None:
    """Collects preferences and trains a team on them, or prints the plan. Wrong settings end the program."""
    with end_on_wrong_input(settings.prog):
        run = PreferenceRun(settings)
    run.start()


class PreferenceRun:
    """One run: its settings, its rounds, and the folders that they write. A wrong setting raises `ConfigError`."""

    environment: Environment
    roles: Sequence[str]
    given: Dataset | None = None  # the preferences that the user gave
    items: Dataset
    eval_items: Dataset | None

    def __init__(self, settings: Settings):
        algorithm, arguments = settings.algorithm, settings.arguments
        self.trained_with = algorithm
        self.in_rounds = algorithm in ITERATIVE
        self.num_rounds: int = arguments["num_iterations"] if self.in_rounds else 1
        if settings.extras.resume_from_checkpoint in (
            True,
            AUTO,
        ):  # every run resumes; an early phase has no checkpoint yet
            if not settings.has_named_folder:
                raise ConfigError(NO_FOLDER)
            settings.extras.resume_from_checkpoint = None
        if self.in_rounds and settings.extras.resume_from_checkpoint is not None:
            advice = "start the run again with the same RUN_ID or `output_dir`, and it goes on"
            raise ConfigError(f"`{algorithm}.resume_from_checkpoint` cannot be a folder: {advice}.")
        self.preference_dataset: str | None = arguments.get("preference_dataset")
        if self.in_rounds and self.preference_dataset is not None:
            raise ConfigError(f"`{algorithm}.preference_dataset`: every round collects its preferences. Remove it.")
        self.prepared = run = prepare_run(settings, self.training_args(settings))
        changes: dict[str, Any] = {"disable_tqdm": run.training_args.disable_tqdm}
        changes["output_dir"] = self.preference_dataset or str(self.preferences_folder(0))
        self.teams_folder = run.run_folder / ROUNDS_FOLDER / TEAMS_FOLDER
        if self.in_rounds:
            self.teams_folder = Path(arguments.get("policy_checkpoint_dir") or self.teams_folder)
            changes["policy_checkpoint_dir"] = str(self.teams_folder)
            check_folder(f"`{algorithm}.policy_checkpoint_dir`", self.teams_folder)
        self.preferences, self.replay = make_config(settings, **changes), settings.part(ReplayConfig)
        self.state = start_processes()
        advice = f"choose another folder, or set `{algorithm}.resume_changes: allow`"
        decisive = decisive_settings(run.merged, algorithm)
        self.stage = Stage(run.run_folder, "run", decisive, self.state, advice=advice)

    # Methods that a run with a reward model overrides

    def training_args(self, settings: Settings) -> Any:
        return make_training_args(settings)

    @property
    def items_to_compare(self) -> Dataset:
        """The items for which preferences are collected."""
        return self.items

    def scoring(self, number: int) -> Environment:
        """Returns the environment that scores the answers of a round."""
        return self.environment

    def training_data(self, number: int, preferences: Dataset) -> dict[str, Any]:
        """Returns the arguments of a round's trainer that depend on its preferences."""
        return {"environment": self.environment, "train_dataset": preferences}

    def print_plan(self) -> None:
        print_plan(self.pair_lines())

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
                files = map(self.results_file, range(self.num_rounds))
                complete = [self.stage.result(file) for file in files if self.stage.has(file)]  # reports damaged files
                if complete and run.training_args.resume_changes != "allow":
                    self.stage.check()
                for number in range(self.num_rounds):
                    self.check_processes(number)
                self.items, self.eval_items = run.load_datasets()
            check_run(run, self.environment, self.items)
            try:
                with end_with_one_line(run.prog):
                    trainer = self.train()
            except (ConfigError, LoadError) as error:
                fail(run.prog, error)
            if trainer is not None:
                trainer.accelerator.wait_for_everyone()
                trainer.accelerator.end_training()

    def train(self) -> Any:
        """
        Runs the rounds that are not complete, and saves the last team. Returns its trainer; `None` if all rounds were
        complete.
        """
        run, stage = self.prepared, self.stage
        if self.state.is_main_process:
            stage.begin()
            write_settings(run)
        set_up_wandb(run.wandb)
        results: list[dict[str, Any]] = []
        trainer = None
        for number in range(self.num_rounds):
            self.stop_if_asked()
            if stage.has(self.results_file(number)):
                results.append(stage.result(self.results_file(number)))
                continue
            if self.in_rounds:
                self.say(f"\nRound {number + 1} of {self.num_rounds}")
            trainer, numbers = self.train_round(number, results)
            results.append(numbers)
            if self.in_rounds and number == self.num_rounds - 1:  # before the round counts as complete
                self.save_last(trainer, results)
            stage.save_result(self.results_file(number), numbers)
        if self.in_rounds:
            self.say(table(results))
        if trainer is None:
            self.say(f"The run in {run.run_folder} is complete.")
        return trainer

    # One round

    def train_round(self, number: int, results: list[dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
        """
        Runs a round: collects, trains on these and earlier preferences, and saves the team. `results`: those of
        earlier rounds.
        """
        run, source = self.prepared, self.team_before(number)
        preferences, collection = self.collect(number, source)
        chosen = self.replayed(number, preferences) if self.in_rounds else preferences
        if len(chosen) == 0:
            where = f" The team before this round is in {source}." if source else ""
            raise ConfigError(
                f"The collection in {self.preferences_folder(number)} has no pairs: all answers to an item have "
                "the same reward. Sample "
                f"more candidates or at a higher temperature, or start from another team.{where}"
            )
        trainer, checkpoint = self.make_trainer(number, chosen, source)
        if not self.in_rounds:
            run.resume_from_checkpoint = checkpoint
            train_and_save(run, trainer)
            facts = {"collection": collection, "env_step": trainer.env_step, "steps": trainer.state.global_step}
            return trainer, facts
        before = self.reward_before(trainer, results)
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
        show_progress(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        after = self.evaluate(trainer)
        self.save_team(number + 1, lambda path: trainer.save_model(path, _internal_call=True))
        numbers = {"round": number, "collection": collection, "iter": facts, "env_step": trainer.env_step}
        numbers |= {"eval_before": before, "eval": after, "steps": trainer.state.global_step}
        return trainer, {**numbers, "log_history": trainer.state.log_history}

    def collect(self, number: int, source: str | None) -> tuple[Dataset, dict[str, Any]]:
        """
        Collects the preferences of a round with the team in `source` or the base. Returns them and the numbers of the
        collection.
        """
        if self.given is not None:
            return self.given, {}
        run, folder = self.prepared, self.preferences_folder(number)
        comparator = build(self.preferences.comparator_model_name, run.builders)
        config = dataclasses.replace(self.preferences, output_dir=str(folder), comparator_model_name=comparator)
        environment = self.scoring(number)
        with without_sharding(run.training_args):
            team = run.load_team(self.roles, source)
            team = team if run.agent_model.is_quantized else team.to(self.state.device)
            with end_on_wrong_input(run.prog):
                preferences = collect_preferences(team, environment, self.items_to_compare, config, round=number)
        return preferences, read_json(folder / PREFERENCES_FILE)["numbers"]

    def replayed(self, number: int, preferences: Dataset) -> Dataset:
        """Returns the preferences that a round trains on."""
        folders = [self.preferences_folder(k) for k in range(number)]
        with end_on_wrong_input(self.prepared.prog):
            rounds = [*map(load_from_disk, folders), preferences]
        drawn = replay([len(dataset) for dataset in rounds], self.replay, self.preferences.seed)
        if not drawn:
            return preferences.select([])
        columns = [column for role in self.roles for column in text_columns(role)]
        columns += [CHOSEN_REWARD, REJECTED_REWARD, ITEM_ID, ROUND]
        starts = [sum(map(len, rounds[:k])) for k in range(len(rounds))]
        everything = concatenate_datasets([dataset.select_columns(columns) for dataset in rounds if len(dataset) > 0])
        return everything.select([starts[k] + position for k, position in drawn])

    def make_trainer(self, number: int, preferences: Dataset, source: str | None) -> tuple[Any, str | None]:
        """
        Makes the trainer of a round, and finds the checkpoint to resume from, which may be that of the last step.
        """
        run, folder = self.prepared, self.round_folder(number)
        data, args = self.training_data(number, preferences), run.training_args
        if self.in_rounds:
            args = copy.copy(args)
            args.output_dir, args.push_to_hub = str(folder), False
        checkpoint = self.checkpoint_of(number)
        forget_engine()
        with end_on_wrong_input(run.prog):
            team = run.load_team(self.roles, source)
            trainer_class: Any = ALGORITHMS[self.trained_with].trainer_class()
            trainer = trainer_class(team=team, args=args, eval_dataset=self.eval_items, **data)
        return trainer, checkpoint

    def checkpoint_of(self, number: int) -> str | None:
        """Returns the checkpoint from which the training of a round resumes; `None` if there is none."""
        folder = self.round_folder(number)
        last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        return self.prepared.resume_from_checkpoint or last

    def check_processes(self, number: int) -> None:
        """Raises `ValueError` if the checkpoint of an incomplete round comes from another number of processes."""
        checkpoint, args = self.checkpoint_of(number), self.prepared.training_args
        if checkpoint is not None and not self.stage.has(self.results_file(number)):
            before = read_checkpoint(checkpoint)["settings"]["number of processes"]
            if before != args.world_size:
                check_changes(checkpoint, {"number of processes": (before, args.world_size)}, args)

    def reward_before(self, trainer: Any, results: list[dict[str, Any]]) -> dict[str, float] | None:
        """Returns the evaluation of the team before a round. The base is evaluated once."""
        if results:
            return results[-1].get("eval")
        if not self.stage.has(BEFORE_FILE):
            self.stage.save_result(BEFORE_FILE, self.evaluate(trainer))
        return self.stage.result(BEFORE_FILE)

    def evaluate(self, trainer: Any) -> dict[str, float] | None:
        """
        Plays the evaluation items, with the same random numbers in every round. Returns `None` if there are no such
        items.
        """
        if self.eval_items is None:
            return None
        with seeded(trainer.args.seed, trainer.accelerator.device):
            metrics = trainer.evaluate()
        return {name.removeprefix("eval_"): value for name, value in metrics.items()}

    # Folders

    def round_folder(self, number: int) -> Path:
        folder = self.prepared.run_folder
        return folder / ROUNDS_FOLDER / ROUND_FOLDER.format(number) if self.in_rounds else folder

    def preferences_folder(self, number: int) -> Path:
        return self.round_folder(number) / ("preferences" if self.in_rounds else PREFERENCES_FOLDER)

    def results_file(self, number: int) -> str:
        """Returns the name of the results of a round, the part of the stage that a round writes last."""
        return str((self.round_folder(number) / RESULTS_FILE).relative_to(self.prepared.run_folder))

    def team_before(self, number: int) -> str | None:
        """
        Returns the folder of the team before a round; `None` if it is the base. Saves the base if a comparator needs
        it.
        """
        folder = self.teams_folder / ROUND_FOLDER.format(number)
        if number > 0:
            return str(folder)
        keeps_base = self.in_rounds and self.preferences.comparator_policy == "history"
        if keeps_base and not (folder / TEAM_FILE).is_file():
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

    def save_last(self, trainer: Any, results: list[dict[str, Any]]) -> None:
        """Saves the last team with a card that shows the logs of all rounds, and pushes it if `push_to_hub` is set."""
        run, args = self.prepared, self.prepared.training_args
        history = []
        for k, result in enumerate(results):
            offset = sum(earlier["steps"] for earlier in results[:k])
            history += [{**entry, "step": entry["step"] + offset} for entry in result["log_history"]]
        with (
            temporarily_set(trainer.args, output_dir=str(run.run_folder), push_to_hub=False),
            temporarily_set(trainer.state, log_history=history),
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
            raise Stopped("between two phases")

    def say(self, text: str) -> None:
        if self.state.is_main_process:
            print(text, flush=True)

    # The plan

    def collection_lines(self) -> dict[str, Any]:
        """Returns the lines of a plan about the preferences, made without loading a model."""
        if self.preference_dataset is not None:
            return {"preferences": self.preference_dataset}

        def load_items() -> Dataset:
            self.items, _ = self.prepared.load_datasets()
            return self.items_to_compare

        return cost(self.preferences, self.environment, load_items)

    def pair_lines(self) -> dict[str, Any]:
        """Returns the plan of the run, made without loading a model."""
        run, args = self.prepared, self.prepared.training_args
        lines = {"algorithm": f"{run.algorithm}, loss {' + '.join(args.loss_type)}, beta {args.beta:g}"}
        lines |= collaboration(run)
        lines["agents"] = f"{agents(run.model_names, self.roles)} ({run.form_in_words})"
        if self.in_rounds:
            lines["rounds"] = f"{self.num_rounds}, preference_replay_mode {self.replay.preference_replay_mode}"
            lines["each round"] = "collects, draws from these and earlier preferences, and trains"
        lines |= self.collection_lines()
        pairs = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        steps = f"max_steps {args.max_steps}" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
        lines["training"] = f"{count(pairs, 'pair')} per optimizer step, {steps}, learning rate {args.learning_rate:g}"
        split = run.dataset.eval_split
        evaluation = f"the task's reward on split {split}, eval_strategy {args.eval_strategy.value}"
        lines["evaluation"] = "none" if split is None else evaluation
        lines["output folder"] = str(run.run_folder)
        lines["trained team"] = str(run.team_folder) if run.saves_team else "not saved"
        if self.stage.has(RESULTS_FILE) or is_collection(self.preferences.output_dir):
            lines["done already"] = "some phases, which are skipped if the settings have not changed"
        return lines


class RoundLog(TrainerCallback):
    """Logs facts about a round when its training begins."""

    def __init__(self, trainer: Any, facts: dict[str, float]):
        self.trainer, self.facts = trainer, facts

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:  # a resumed training has them in its log
            self.trainer.log(dict(self.facts))


def decisive_settings(merged: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Returns the settings that must be the same when a run is resumed, by their paths."""
    values = {}
    for section, body in merged.items():
        if not isinstance(body, Mapping):
            values[section] = body
        elif section not in FREE_SECTIONS:
            free = FREE_KEYS if section == algorithm else ()
            values |= {f"{section}.{name}": value for name, value in body.items() if name not in free}
    return values


def table(results: list[dict[str, Any]]) -> str:
    """Returns the rounds of a run as a table."""
    rows = [["round", "scored", "pairs", "trained on", "sampled reward", "held-out reward"]]
    for result in results:
        collection, after = result["collection"], result["eval"]
        counts = [result["round"] + 1, collection["candidates_scored"], collection["pairs"]]
        counts.append(result["iter"]["train_preference_pairs"])
        held_out = "" if after is None else f"{after['reward']:.3f}"
        rows.append([*map(str, counts), f"{collection['mean_reward']:.3f}", held_out])
    before = results[0]["eval_before"] if results else None
    start = "" if before is None else f"Held-out reward before: {before['reward']:.3f}\n"
    return start + "\n".join(text_table(rows))

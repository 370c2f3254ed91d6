"""
MADPO and MARLHF, once or in rounds, as lists of stages: [`STAGES`]. What a stage makes is in the folder of the run.

A run that is started again in its folder skips complete rounds and stages, and continues an interrupted one from its
last chunk or checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset, concatenate_datasets, load_from_disk
from peft import LoraConfig, PeftConfig
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import unset_hf_deepspeed_config
from transformers.utils import flatten_dict

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.reward_models import JointRewardModel, ModelRewardEnvironment
from trl_multiagent.folders import PREFERENCES_FILE, TEAM_FILE, last_checkpoint, read_json
from trl_multiagent.hub import open_repo
from trl_multiagent.jobs.distributed import fail_together, is_asked_to_stop, start_processes
from trl_multiagent.jobs.fingerprint import checksum_of_weights, digest_of_rows
from trl_multiagent.jobs.signals import Stopped, end_on_signal
from trl_multiagent.jobs.stage import MANIFEST, Stage
from trl_multiagent.models.pretrained import temporarily_set
from trl_multiagent.preferences.collection import collect_preferences, load_preferences, seeded
from trl_multiagent.preferences.comparators import ROUND_FOLDER
from trl_multiagent.preferences.pairs import ReplayConfig, replay
from trl_multiagent.preferences.rows import ITEM_ID, ROUND, columns_of
from trl_multiagent.report.run_page import OWN_SECTIONS
from trl_multiagent.report.run_report import check_unused
from trl_multiagent.runs.collection import check_comparator, cost, make_config
from trl_multiagent.runs.models import loading_arguments, make_environment, make_peft_config, read_section, read_values
from trl_multiagent.runs.plan import agents, collaboration, count, print_plan, rollout_lines
from trl_multiagent.runs.prepared import (
    check_folder,
    check_results,
    check_run,
    check_team,
    first_rows,
    prepare_run,
    start_logging,
)
from trl_multiagent.runs.run import end_on_wrong_input, end_with_one_line
from trl_multiagent.runs.training import save_results, set_up_wandb, train_and_save, write_settings
from trl_multiagent.settings.algorithms import ALGORITHMS, ITERATIVE, import_class
from trl_multiagent.settings.derive import Settings, argument_errors, check_models, make_training_args
from trl_multiagent.settings.read import ConfigError, config_errors
from trl_multiagent.settings.schema import AUTO, PEFT_DEFAULTS, RewardSettings
from trl_multiagent.team.load import build
from trl_multiagent.trainers.joint_reward_config import JointRewardConfig
from trl_multiagent.trainers.joint_reward_trainer import HELD_OUT_FILE, JointRewardTrainer


# In the folder of the run. Names with an underscore are not pushed
PREFERENCES_FOLDER, REWARD_FOLDER, ROUNDS_FOLDER = "_preferences", "_reward_model", "_rounds"
TEAMS_FOLDER = "teams"  # in `ROUNDS_FOLDER`: the team before each round
RESULTS_FILE = "results.json"  # of a round, written last
# Settings of the algorithm that may differ when a run is resumed
FREE_KEYS = "num_iterations logging_steps report_to disable_tqdm push_to_hub hub_model_id output_dir".split()
# Arguments of the team's trainer that the reward model's trainer shares: accelerate has one precision per process
SHARED = "seed bf16 fp16 deepspeed disable_tqdm gradient_checkpointing dataloader_pin_memory output_dir".split()
# Of a reward model: the section of a training alone, the file that is written last, the metrics of an evaluation (the
# loss, TRL's, and the ones of held-out pairs), and the arguments that may differ when a training is resumed
SECTION, COMPLETE_FILE = "reward_model", "complete.json"
EVAL_METRICS = "loss accuracy margin mean_reward min_reward max_reward".split()
FREE = "output_dir logging_dir report_to disable_tqdm run_name hub_token save_total_limit".split()


def run_preferences(settings: Settings) -> None:
    """Runs MADPO or MARLHF, or prints the plan. Wrong settings and wrong input end the program."""
    prog = settings.prog
    with end_on_wrong_input(prog):
        run = PreferenceRun(settings)
    prepared = run.prepared
    go_on = [] if prepared.has_named_folder else ["--output_dir", run.args.output_dir]
    start_logging(prepared, run.args.disable_tqdm)
    prepared.introduce()
    with end_on_signal(prog, go_on), prepared.reservation:
        with end_on_wrong_input(prog):
            run.environment = prepared.make_environment()
            run.roles = run.environment.roles
            check_team(prepared, run.roles)
            if run.preference_dataset is None:
                check_comparator(run.preferences)
            else:
                run.given = load_preferences(run.preference_dataset, run.roles)
            if prepared.dry_run:
                return print_plan(plan(run))
            paths = (run.part_of(number, RESULTS_FILE) for number in range(run.num_rounds))
            results = [read_json(path) for path in takewhile(Path.is_file, paths)]
            if not run.stage.has(MANIFEST):
                check_unused(run.stage.folder)
            run.items, run.eval_items = prepared.load_datasets()
            rows = digest_of_rows(run.items if run.given is None else run.given)
            run.stage.settings["rows of the dataset"] = rows
            if results and run.args.resume_changes != "allow":
                run.stage.check()
            if run.in_rounds and isinstance(run.eval_items, dict):
                raise ConfigError(f"The task has the evaluation sets {', '.join(run.eval_items)}; rounds need one.")
        check_run(prepared, run.environment, run.items)
        with end_with_one_line(prog):
            run_stages(run, results)


def run_stages(run: PreferenceRun, results: list[dict[str, Any]]) -> None:
    """Runs the stages of the rounds that are not complete. `results`: the results of the complete rounds."""
    args = run.args
    if len(results) == run.num_rounds:
        return run.say(f"The run in {run.stage.folder} is complete.")
    if args.push_to_hub:  # a push without permission ends the run here
        with fail_together(run.state):
            if run.state.is_main_process:
                name = args.hub_model_id or run.stage.folder.absolute().name
                open_repo(name, args.hub_private_repo, args.hub_token, args.hub_revision, create_pr=False)
    if run.state.is_main_process:
        run.stage.begin()
        write_settings(run.prepared)
    set_up_wandb(run.prepared.wandb)
    state = copy.deepcopy(run.environment.state_dict())
    for number in range(len(results), run.num_rounds):
        now = Round(run, number, results, {"round": number} if run.in_rounds else {})
        for stage in run.stages:
            if now.trainer is None and is_asked_to_stop(run.state):  # a trained team is saved first
                raise Stopped("between two rounds")
            if state:  # every stage begins with it, because an interrupted run does
                run.environment.load_state_dict(copy.deepcopy(state))
            stage(now)
        results.append(now.results)
        run.stage.save_result(str(run.part_of(number, RESULTS_FILE).relative_to(run.stage.folder)), now.results)
    now.trainer.accelerator.wait_for_everyone()
    now.trainer.accelerator.end_training()


# The stages


@dataclass
class Round:
    """A round, the only one of a run without rounds, and what a stage hands on to the next ones."""

    run: PreferenceRun
    number: int
    earlier: list[dict[str, Any]]  # the results of the rounds before
    results: dict[str, Any]  # of this one, written last
    source: str | None = None  # folder of the team before the round; `None` for the base
    pairs: Dataset = field(init=False)  # the preferences to train on
    trainer: Any = None  # of the team


def collect(now: Round) -> None:
    """Collects preferences with the team, and draws from these and earlier ones."""
    run, number, folder = now.run, now.number, now.run.part_of(now.number, PREFERENCES_FOLDER)
    if run.in_rounds:
        run.say(f"\nRound {number + 1} of {run.num_rounds}")
    with end_on_wrong_input(run.prepared.prog):
        if number > 0:
            now.source = str(run.team_before(number))
        elif run.in_rounds and run.preferences.comparator_policy == "history":
            with without_sharding(run.args):
                team = run.prepared.load_team(run.roles)
            with writing_team(run, 0) as path:  # which later rounds are compared with
                if run.state.is_main_process:
                    team.save_pretrained(path)
        now.pairs, now.results["collection"] = sample_pairs(now, folder) if run.given is None else (run.given, {})
        if run.in_rounds:
            now.pairs = replayed(run, number, now.pairs)
        if len(now.pairs) == 0:
            where = f" The team before this round is in {now.source}." if now.source else ""
            raise ConfigError(
                f"The collection in {folder} has no pairs: all answers to an item have the same reward.{where}"
            )


def learn_reward(now: Round) -> None:
    """Trains a joint reward model on the preferences."""
    run, folder = now.run, now.run.part_of(now.number, REWARD_FOLDER)
    run.say(f"\nTraining the reward model on {len(now.pairs)} preferences")
    settings: Any = run.reward_args  # every training has a copy with its own DeepSpeed configuration
    with end_on_wrong_input(run.prepared.prog):
        args: JointRewardConfig = replace(settings, output_dir=str(folder))
        model = build(run.reward_base, run.prepared.builders)
        train_reward_model(model, args, now.pairs, list(run.roles), run.reward_peft)


def train_on_pairs(now: Round) -> None:
    """Trains the team on the preferences."""
    train_team(now, now.run.environment, now.pairs)


def train_on_reward(now: Round) -> None:
    """Trains the team with the reward of the model."""
    run = now.run
    run.say(f"\nTraining the team: {run.trained_with} with the reward of the model")
    with end_on_wrong_input(run.prepared.prog):
        environment = with_reward_of(run, now.number, run.reward.score_task_reward)
    train_team(now, environment, run.items)


def evaluate(now: Round) -> None:
    """Plays the evaluation items, if there are any, with the same random numbers in every round."""
    run, trainer, collection = now.run, now.trainer, now.results["collection"]
    reward = math.nan
    if run.eval_items is not None:
        with seeded(trainer.args.seed):
            metrics = trainer.evaluate()
        now.results["eval"] = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        reward = now.results["eval"]["reward"]
    run.say(
        f"Round {now.number + 1}: {collection['candidates_scored']} answers scored, {collection['pairs']} pairs, "
        f"{len(now.pairs)} trained on, held-out reward {reward:.3f}"
    )


def save(now: Round) -> None:
    """Saves the team for the next round. The last team is the result of the run, which may be pushed."""
    run = now.run
    with writing_team(run, now.number + 1) as path, temporarily_set(now.trainer, _saving=True):  # no final folder
        now.trainer.save_model(path, _internal_call=True)
    if now.number == run.num_rounds - 1:
        args = now.trainer.args  # of the card and the upload; a copy of arguments has no token
        args.output_dir, args.hub_token = run.args.output_dir, run.args.hub_token
        save_results(run.prepared, now.trainer)


STAGES: dict[str, tuple[Callable[[Round], None], ...]] = {
    "madpo": (collect, train_on_pairs),
    "madpo_iter": (collect, train_on_pairs, evaluate, save),
    "marlhf": (collect, learn_reward, train_on_reward),
    "marlhf_iter": (collect, learn_reward, train_on_reward, evaluate, save),
}


# The run


class PreferenceRun:
    """A run of MADPO or MARLHF: its settings, and what its rounds share. A wrong setting raises `ConfigError`."""

    environment: Environment
    roles: Sequence[str]
    given: Dataset | None = None  # the preferences that the user gave
    items: Dataset
    eval_items: Dataset | None
    reward: RewardSettings  # of MARLHF
    reward_peft: LoraConfig | None = None  # the adapter of its reward model

    def __init__(self, settings: Settings):
        algorithm, arguments, extras = settings.algorithm, settings.arguments, settings.extras
        self.trained_with, self.in_rounds, self.stages = algorithm, algorithm in ITERATIVE, STAGES[algorithm]
        self.num_rounds: int = arguments["num_iterations"] if self.in_rounds else 1
        self.num_items: int | None = arguments.get("preference_num_items")  # of a collection; all by default
        self.preference_dataset: str | None = arguments.get("preference_dataset")
        self.processed: Any = {}  # how the scores of a reward model are processed, if not as rewards of the task
        if learn_reward in self.stages:
            self.reward = reward = settings.part(RewardSettings)
            self.trained_with = reward.rl_algorithm
            if not reward.process_model_reward:
                self.processed = {"reward_scale": 1.0, "reward_shift": 0.0}
        if extras.resume_from_checkpoint is True:  # an early stage has no checkpoint yet
            extras.resume_from_checkpoint = AUTO
        if self.in_rounds and extras.resume_from_checkpoint not in (None, False, AUTO):
            raise ConfigError(
                f"`{algorithm}.resume_from_checkpoint` cannot be a folder: the same RUN_ID or `output_dir` goes on."
            )
        if self.in_rounds and self.preference_dataset:
            raise ConfigError(f"`{algorithm}.preference_dataset`: every round collects its preferences. Remove it.")
        self.state = start_processes()
        self.args = args = make_training_args(settings, self.trained_with, **self.processed)
        self.prepared = run = prepare_run(settings, args)
        changes = {
            "disable_tqdm": args.disable_tqdm,
            "output_dir": self.preference_dataset or str(self.part_of(0, PREFERENCES_FOLDER)),
        }
        if self.in_rounds:
            own_folder = run.run_folder / ROUNDS_FOLDER / TEAMS_FOLDER
            self.teams_folder = Path(arguments.get("policy_checkpoint_dir") or own_folder)
            changes["policy_checkpoint_dir"] = str(self.teams_folder)
            check_folder(f"`{algorithm}.policy_checkpoint_dir`", self.teams_folder)
        self.preferences, self.replay = make_config(settings, **changes), settings.part(ReplayConfig)
        decisive = flatten_dict({name: x for name, x in run.merged.items() if name not in OWN_SECTIONS})
        decisive[f"{algorithm}.bf16"] = args.bf16  # by default, the machine decides
        self.stage = Stage(
            run.run_folder,
            "run",
            decisive,
            self.state,
            free=[f"{algorithm}.{name}" for name in FREE_KEYS],
            advice=f"choose another folder, or set `{algorithm}.resume_changes: allow`",
        )
        if learn_reward in self.stages:
            self.reward_base = reward.reward_model_name or settings.model_list[0]
            check_models(f"{algorithm}.reward_model_name", self.reward_base, settings.task.models)
            check_models(f"{algorithm}.critic_models", arguments.get("critic_models") or [])
            self.reward_args = make_reward_args(settings, reward, args)
            if reward.reward_peft is not None:
                if reward.reward_freeze_backbone:
                    raise ConfigError(
                        f"`{algorithm}.reward_freeze_backbone` trains the head: remove `{algorithm}.reward_peft`."
                    )
                own = {**PEFT_DEFAULTS, **reward.reward_peft}
                with config_errors():
                    self.reward_peft = read_section(f"{algorithm}.reward_peft", own, LoraConfig)

    def part_of(self, number: int, name: str = "") -> Path:
        """
        Returns the path of a round, or of a part of it. Only in the folder of the run, which is pushed, the part's
        name has an underscore.
        """
        folder = self.prepared.run_folder
        if not self.in_rounds:
            return folder / name
        return folder / ROUNDS_FOLDER / ROUND_FOLDER.format(number) / name.removeprefix("_")

    def team_before(self, number: int) -> Path:
        return self.teams_folder / ROUND_FOLDER.format(number)

    def say(self, text: str) -> None:
        if self.state.is_main_process:
            print(text, flush=True)


# The parts of a stage


def sample_pairs(now: Round, folder: Path) -> tuple[Dataset, dict[str, Any]]:
    """Collects the preferences of a round. Returns them and the numbers of the collection."""
    run, prepared = now.run, now.run.prepared
    run.say(f"Collecting preferences in {folder}")
    comparator = build(run.preferences.comparator_model_name, prepared.builders)
    config = replace(run.preferences, output_dir=str(folder), comparator_model_name=comparator)
    environment, items = run.environment, first_rows(run.items, run.num_items)
    if now.number > 0 and prepared.arguments.get("preference_scoring_reward") == "reward_model":
        config = replace(config, **run.processed)
        environment = with_reward_of(run, now.number - 1, score_task=False)
    with without_sharding(run.args):
        team = prepared.load_team(run.roles, now.source)
        team = team if prepared.agent_model.is_quantized else team.to(run.state.device)
        preferences = collect_preferences(team, environment, items, config, round=now.number)
    return preferences, read_json(folder / PREFERENCES_FILE)["numbers"]


def replayed(run: PreferenceRun, number: int, preferences: Dataset) -> Dataset:
    """Returns the preferences that a round trains on. `preferences`: its own."""
    rounds = [*(load_from_disk(run.part_of(k, PREFERENCES_FOLDER)) for k in range(number)), preferences]
    drawn = replay([len(dataset) for dataset in rounds], run.replay, run.preferences.seed)
    if not drawn:
        return preferences.select([])
    columns = [*columns_of(run.roles), ITEM_ID, ROUND]
    starts = [0, *accumulate(map(len, rounds))]
    everything = concatenate_datasets(
        [x.select_columns([name for name in columns if name in x.column_names]) for x in rounds if len(x) > 0]
    )
    return everything.select([starts[k] + position for k, position in drawn])


def with_reward_of(run: PreferenceRun, number: int, score_task: bool) -> Environment:
    """Returns the task with the reward of a round's model."""
    with without_sharding(run.args), config_errors():
        reward = JointRewardModel(str(run.part_of(number, REWARD_FOLDER)))
    return ModelRewardEnvironment(run.environment, reward, score_task, checksum_of_weights(reward.model.parameters()))


def train_team(now: Round, environment: Environment, dataset: Dataset) -> None:
    """Trains the team of a round from its last checkpoint, which may come from the last step."""
    run, prepared, folder = now.run, now.run.prepared, now.run.part_of(now.number)
    with end_on_wrong_input(prepared.prog):
        args = run.args
        if run.in_rounds:
            args = copy.copy(args)
            args.output_dir, args.push_to_hub = str(folder), False
        checkpoint = prepared.resume_from_checkpoint or last_checkpoint(folder)
        if checkpoint is None and run.state.is_main_process:
            (folder / TEAM_FILE).unlink(missing_ok=True)  # of this run, if it was killed before it wrote its results
        forget_engine()
        now.trainer = trainer = import_class(ALGORITHMS[run.trained_with].trainer)(
            team=prepared.load_team(run.roles, now.source),
            environment=environment,
            args=args,
            train_dataset=dataset,
            eval_dataset=run.eval_items,
        )
    results = now.results
    if run.in_rounds:
        if now.earlier and checkpoint is None:
            trainer.env_step = now.earlier[-1]["env_step"]
        collections = [result["collection"] for result in (*now.earlier, results)]
        results["iter"] = {
            "current_iteration": now.number + 1,
            "current_preference_pairs": collections[-1]["pairs"],
            "total_preference_pairs": sum(x["pairs"] for x in collections),
            "train_preference_pairs": len(now.pairs),
            "candidates_scored": sum(x["candidates_scored"] for x in collections),
        }
        trainer.add_callback(RoundLog(trainer, {f"iter/{name}": value for name, value in results["iter"].items()}))
        trainer.train(resume_from_checkpoint=checkpoint)
        results |= {"eval": None, "log_history": trainer.state.log_history}
    else:
        prepared.resume_from_checkpoint = checkpoint
        train_and_save(prepared, trainer)
    results |= {"env_step": trainer.env_step, "steps": trainer.state.global_step}


@dataclass(eq=False)
class RoundLog(TrainerCallback):
    """Logs facts about a round when its training begins."""

    trainer: Any
    facts: dict[str, float]

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:  # a resumed training has them in its log
            self.trainer.log(self.facts)


@contextlib.contextmanager
def writing_team(run: PreferenceRun, number: int) -> Iterator[str]:
    """Yields a folder for the team before a round. The final folder appears atomically after the block."""
    folder = run.team_before(number)
    unfinished = folder.with_name(f"_{folder.name}")
    with fail_together(run.state):
        if run.state.is_main_process and unfinished.is_symlink():
            unfinished.unlink()
        yield str(unfinished)
        if run.state.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)


# The plan


def plan(run: PreferenceRun) -> dict[str, Any]:
    """Returns the lines of the plan, made without loading a model."""
    prepared, lines = run.prepared, {}
    if run.in_rounds:
        lines["rounds"] = f"{run.num_rounds}, preference_replay_mode {run.replay.preference_replay_mode}"
    if run.preference_dataset is None:
        lines |= cost(run.preferences, run.environment, lambda: first_rows(prepared.load_datasets()[0], run.num_items))
    else:
        prepared.load_datasets()  # checks them
        lines["preferences"] = run.preference_dataset
    args = run.args
    if learn_reward not in run.stages:
        pairs = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        steps = f"max_steps {args.max_steps}" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
        when = args.eval_strategy.value
        evaluated = f"the task's reward on split {prepared.dataset.eval_split or 'whole'}, by {when}"
        return {
            **lines,
            "algorithm": f"{prepared.algorithm}, loss {' + '.join(args.loss_type)}, beta {args.beta:g}",
            **collaboration(prepared),
            "agents": f"{agents(prepared.model_names, run.roles)} ({prepared.form_in_words})",
            "training": f"{count(pairs, 'pair')} per optimizer step, {steps}, learning rate {args.learning_rate:g}",
            "evaluation": "no" if when == "no" else evaluated,
            "output folder": prepared.run_folder,
        }
    args = run.reward_args
    adapter = "all weights" if run.reward_peft is None else f"LoRA of rank {run.reward_peft.r}"
    trained = "the head" if args.freeze_backbone else adapter
    return {
        **lines,
        "reward model": f"starts from {run.reward_base}, trains {trained}",
        "reward training": (
            f"{1 - args.eval_fraction:.0%} of the items, {args.num_train_epochs:g} epochs, "
            f"{args.per_device_train_batch_size} pairs per device and step, learning rate {args.learning_rate:g}"
        ),
        **rollout_lines(prepared, run.environment),
        "algorithm": f"{prepared.algorithm}, {run.trained_with} with the reward of the model",
    }


# The settings of the reward model


def make_reward_args(settings: Settings, reward: RewardSettings, args: Any) -> JointRewardConfig:
    """Makes the arguments of the reward model's trainer. `args`: the arguments of the team's trainer."""
    section = f"{settings.algorithm}.reward_training"
    with config_errors():
        more = read_values(section, reward.reward_training or {}, JointRewardConfig)
    same = "learning_rate num_train_epochs max_length freeze_backbone eval_fraction".split()
    if "output_dir" in more:
        raise ConfigError(f"`{section}.output_dir` cannot be set: it is in the folder of the run.")
    values = {
        **{name: getattr(reward, f"reward_{name}") for name in same},
        "per_device_train_batch_size": reward.reward_train_batch_size,
        "per_device_eval_batch_size": max(8, reward.reward_train_batch_size),
        "trust_remote_code": settings.agent_model.trust_remote_code,
        "model_init_kwargs": (not reward.reward_model_name and settings.agent_model.given("revision")) or None,
        "logging_steps": 10,
        **{name: getattr(args, name) for name in SHARED},
        **more,
    }
    return checked_args(section, more, values)


# The reward model, alone (`train_reward_model.py`) or for MARLHF


def run_reward_model(settings: Settings) -> None:
    """Trains a joint reward model, or prints the plan. Wrong settings end the program."""
    prog = settings.prog
    with end_on_wrong_input(prog):
        args = make_args(settings)
        name, base = settings.arguments["preference_dataset"], str(settings.model_names)
        check_results(settings, args)
        environment = make_environment(settings, Path(args.output_dir))
        preferences = load_preferences(name, environment.roles)
        start_logging(settings, args.disable_tqdm)
        if settings.dry_run:
            return print_plan(
                {
                    "starts from": base,
                    "preferences": f"{name}, {len(preferences)} pairs",
                    "folder": args.output_dir,
                }
            )
        set_up_wandb(settings.wandb)
        peft_config = make_peft_config(settings)
        model = build(base, settings.builders)
        with end_on_signal(prog, []), end_with_one_line(prog):
            train_reward_model(model, args, preferences, list(environment.roles), peft_config)


def make_args(settings: Settings) -> JointRewardConfig:
    """Makes the arguments of the trainer. Raises `ConfigError` if a setting is missing or wrong."""
    model = settings.agent_model
    if settings.arguments.get("preference_dataset") is None:
        raise ConfigError(f"`{SECTION}.preference_dataset` is missing: `trl-multiagent collect` makes preferences.")
    if settings.agents is not None:
        raise ConfigError("A reward model starts from one model: set `agent_model.name` instead of `agents`.")
    if model.is_quantized:
        raise ConfigError("`agent_model.load_in_4bit` and `load_in_8bit` are for teams.")
    has_base = model.torch_dtype and (model.use_peft or settings.has_peft_section)  # of an adapter
    values = {
        "output_dir": str(Path(settings.output.base_dir) / SECTION),
        **settings.arguments_of(JointRewardConfig),
        "model_init_kwargs": ({"dtype": model.torch_dtype} if has_base else {}) | loading_arguments(model),
    }
    return checked_args(SECTION, settings.values[SECTION], values)


def checked_args(section: str, given: dict[str, Any], values: dict[str, Any]) -> JointRewardConfig:
    """
    Makes the arguments of the trainer from `values`. Raises `ConfigError` if one is wrong. `given`: the user's.
    """
    with argument_errors(section, given, values):
        args = JointRewardConfig(**{"save_strategy": "epoch", "save_total_limit": 1, "report_to": "none", **values})
    metric = (args.metric_for_best_model or "loss").removeprefix("eval_")
    if metric not in EVAL_METRICS:
        raise ConfigError(f"`{section}.metric_for_best_model` is {metric!r}; choose one of {', '.join(EVAL_METRICS)}.")
    if args.eval_strategy != "no" and args.eval_fraction == 0:
        raise ConfigError(f"`{section}.eval_strategy` needs pairs that are held out: set `eval_fraction`.")
    return args


def train_reward_model(
    model: str, args: JointRewardConfig, preferences: Dataset, roles: list[str], peft_config: PeftConfig | None
) -> None:
    """
    Trains a joint reward model and saves it in `args.output_dir`, with its report and card. An interrupted training is
    resumed from its last checkpoint; a complete model is kept. Prints numbers about held-out pairs, see
    [`JointRewardTrainer.report`], if there are any. Raises `ValueError` if the folder holds other work or is locked,
    or the checkpoint does not fit.
    """
    folder = Path(args.output_dir)
    is_complete = (folder / COMPLETE_FILE).is_file()
    checkpoint = None if is_complete else last_checkpoint(folder)
    settings = {
        "model": model,
        "roles": roles,
        "rows of the preferences": digest_of_rows(preferences),
        "number of processes": args.world_size,
        "adapter": peft_config and str(sorted(peft_config.to_dict().items(), key=str)),
        **{name: value for name, value in args.to_dict().items() if name not in FREE},
    }
    free = ["number of processes"] if checkpoint is None else []  # only a checkpoint depends on it
    stage = Stage(folder, "reward model", settings, PartialState(), free)
    if is_complete:
        stage.check()
        facts = read_json(folder / COMPLETE_FILE)["report"]
    else:
        with stage.open():
            forget_engine()
            trainer = JointRewardTrainer(model, args, preferences, roles=roles, peft_config=peft_config)
            trainer.train(resume_from_checkpoint=checkpoint)
            facts = {} if trainer.eval_dataset is None else trainer.report()
            trainer.save_model()
            trainer.create_model_card()
            trainer.accelerator.wait_for_everyone()  # until all files are written
            stage.save_result(COMPLETE_FILE, {"report": facts})
    if stage.state.is_main_process:
        text = "no pairs were held out to measure it"
        if facts:
            ordered = f"{facts['accuracy']:.0%} of {facts['pairs']} held-out pairs in the right order"
            text = f"{ordered}, margin {facts['margin']:.2f} ({HELD_OUT_FILE})"
        print(f"Reward model in {folder}: {text}", flush=True)


def forget_engine() -> None:
    """
    Resets accelerate, so that the next trainer can configure DeepSpeed. accelerate keeps its first configuration, and
    refuses others.
    """
    AcceleratorState._reset_state()


@contextlib.contextmanager
def without_sharding(args: TrainingArguments) -> Iterator[None]:
    """Loads full (unsharded) models inside the block, even under ZeRO-3: a collection samples on each rank alone."""
    plugin = args.deepspeed_plugin
    if plugin:  # while it is registered, transformers shards the models that it loads
        unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if plugin:
            plugin.set_deepspeed_weakref()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

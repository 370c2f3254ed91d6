"""
The settings of one run on this machine, the objects that they name (environment, datasets, team, folders), and all
checks before the run.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset, disable_progress_bars
from datasets.exceptions import DatasetsError
from huggingface_hub import get_token
from peft import LoraConfig, PeftModel
from transformers.integrations import get_available_reporting_integrations, is_deepspeed_zero3_enabled
from transformers.utils import logging as transformers_logging

from trl_multiagent.console import tell
from trl_multiagent.environments.base import Environment, describe_environment
from trl_multiagent.environments.dataset_rows import LOCAL_SUFFIXES, Datasets
from trl_multiagent.environments.function_environment import FunctionEnvironment
from trl_multiagent.environments.task import TaskSettings
from trl_multiagent.environments.task_errors import TaskError, describe
from trl_multiagent.folders import last_checkpoint, locked
from trl_multiagent.jobs.distributed import check_agreement, fail_together
from trl_multiagent.jobs.fingerprint import differences
from trl_multiagent.limits import check_dataset
from trl_multiagent.models.pretrained import quiet_loading
from trl_multiagent.report.run_report import check_unused
from trl_multiagent.runs.models import make_environment, make_loader, make_peft_config
from trl_multiagent.runs.run import check_folder, end_on_wrong_input, end_with_one_line
from trl_multiagent.settings.algorithms import ALGORITHMS, ROLLOUTS
from trl_multiagent.settings.derive import Settings, check_repo_id, make_training_args, run_id
from trl_multiagent.settings.read import ConfigError, config_errors, pop_path
from trl_multiagent.settings.schema import AUTO
from trl_multiagent.team.adapters import check_adapter_names
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.team.critics import model_names
from trl_multiagent.team.load import TeamLoader
from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig
from trl_multiagent.trainers.base.checkpoints import check_changes, describe_run, read_checkpoint
from trl_multiagent.trainers.base.rollout_config import RolloutConfig
from trl_multiagent.trainers.base.team_trainer import eval_datasets


# Metrics of an evaluation with no turn, no role and no name of the environment in their own names
EVAL_METRICS = """
    reward return final_turn/reward reward_std num_tokens runtime samples_per_second steps_per_second
""".split()


# Settings with roles as keys or entries
ROLE_SETTINGS = """
    agent_model.adapter_roles {algorithm}.frozen_agents {algorithm}.agent_learning_rates {algorithm}.stop_strings
    {algorithm}.vllm_server_base_urls
""".split()
# transformers cannot detect the packages of these values of `report_to`
NOT_DETECTED = ("azure_ml", "flyte")


@dataclasses.dataclass(kw_only=True)
class PreparedRun(Settings):
    """The settings of one run, completed on the machine that it runs on."""

    training_args: Any  # of the trainer; `output_dir` is the folder of the run
    peft_config: LoraConfig | None  # the adapter of every agent of a LoRA team
    resume_from_checkpoint: str | None  # folder of the checkpoint to continue from
    # Releases the lock of the run's folder when it is closed
    reservation: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    @property
    def task_settings(self) -> TaskSettings:
        """The argument of the task's functions."""
        return self.for_task(self.run_folder)

    @property
    def run_folder(self) -> Path:
        return Path(self.training_args.output_dir)

    @property
    def team_folder(self) -> Path:
        """
        Folder of the trained team: `output.save_path`, or else the run's, so that one folder holds all results and can
        be pushed.
        """
        if self.output.save_path and self.output.save_final_model:
            return Path(self.output.save_path)
        return self.run_folder

    @property
    def dtype(self) -> str:
        """Data type of the weights that are trained."""
        return "bfloat16" if self.training_args.rounds_stochastically and self.peft_config is None else "float32"

    @property
    def compute_dtype(self) -> str:
        """Data type of matrix products."""
        return "bfloat16" if self.training_args.bf16 else "float16" if self.training_args.fp16 else "float32"

    @property
    def loader(self) -> TeamLoader:
        return make_loader(self, self.peft_config)

    @property
    def form_in_words(self) -> str:
        """The form of the team and its data types, for a plan."""
        weights = f"{self.dtype} weights"
        if self.peft_config:
            adapter = (
                f"LoRA of rank {self.peft_config.r} in float32 on a {self.loader.base_dtype(self.compute_dtype)} base"
            )
            adapted = self.agent_model.adapter_roles
            weights = f"{', '.join(adapted)}: {adapter}; any other: {weights}" if adapted else adapter
        form = ", one model for all" if self.agent_model.share_weights else ""
        return f"{weights}, computed in {self.compute_dtype}{form}"

    @property
    def items_per_step(self) -> int:
        """
        Number of items that a training needs: as many as one optimizer step takes, over all processes. A collection
        needs only one.
        """
        args = self.training_args
        return args.items_per_device * args.world_size if isinstance(args, RolloutConfig) else 1

    def make_environment(self) -> Environment:
        """Makes the task's environment. Raises `ConfigError` if settings do not fit to its roles."""
        environment = make_environment(self, self.run_folder)
        roles, args = environment.roles, self.training_args
        for setting in ROLE_SETTINGS:
            section, _, name = setting.format(algorithm=self.algorithm).partition(".")
            for role in self.values[section].get(name) or ():
                if role not in roles:
                    raise ConfigError(
                        f"`{section}.{name}` names {role!r}, which is not a role of the task: {', '.join(roles)}."
                    )
        with config_errors(f"section `{self.algorithm}`: "):
            if isinstance(args, RolloutConfig):
                args.fit(environment)
            else:
                environment.check_turns(args.num_turns)
            if args.metric_for_best_model is not None:
                self.check_best_metric(environment)
        frozen = args.frozen_agents or ()
        if set(roles) <= set(frozen):
            raise ConfigError(f"`{self.algorithm}.frozen_agents` has all roles, so there is nothing to train.")
        for role in args.agent_learning_rates or ():
            if role in frozen:
                raise ConfigError(
                    f"`{self.algorithm}.agent_learning_rates` has {role!r}, which is in `frozen_agents`."
                )
        return environment

    def check_best_metric(self, environment: Environment) -> None:
        """
        Raises `ValueError` if `metric_for_best_model` is not a metric of an evaluation. Reward functions may log any.
        """
        metric = str(self.training_args.metric_for_best_model).removeprefix("eval_")
        parts = ("reward/", "episode/", *(f"agents/{role}/" for role in environment.roles))
        parts += tuple(f"turn_{k + 1}/" for k in range(self.training_args.num_turns))
        is_metric = metric in EVAL_METRICS or (metric.startswith(parts) and metric not in parts)
        if metric == "loss" or not (is_metric or isinstance(environment.unwrapped, FunctionEnvironment)):
            raise ValueError(
                f"`metric_for_best_model` is {metric!r}, which is not a metric; choose one such as "
                f"{', '.join(EVAL_METRICS[:3])}."
            )

    def introduce(self) -> None:
        """Prints the task's introduction, if it has one and this is not a dry run."""
        if self.dry_run or self.task.introduction is None:
            return
        text = self.task.introduction(self.task_settings)
        if text and self.training_args.process_index == 0:
            print(text, flush=True)

    def load_datasets(self) -> Datasets:
        """
        Loads the task's training set and evaluation set, or their first rows. Raises `ConfigError` if there are too
        few for one step, or none for evaluations.
        """
        try:
            train_dataset, eval_dataset = self.task.datasets(self.task_settings)
            for rows in (train_dataset, *eval_datasets(eval_dataset)):
                check_dataset("what the task returns", rows)
        except (ConnectionError, TaskError):
            raise
        except (ValueError, TypeError, OSError, DatasetsError) as error:
            cause = f" ({describe(error.__cause__)})" if isinstance(error, DatasetsError) and error.__cause__ else ""
            raise ConfigError(f"section `dataset`: {error}{cause}") from error
        train_dataset = first_rows(train_dataset, self.dataset.size)
        if len(train_dataset) < self.items_per_step:
            raise ConfigError(
                f"`dataset.train_split` selects {len(train_dataset)} items, fewer than the {self.items_per_step} of "
                f"one optimizer step. Lower `{self.algorithm}.items_per_device`."
            )
        if eval_dataset is not None:
            eval_dataset = first_rows(first_rows(eval_dataset, self.dataset.eval_size), self.extras.eval_num_samples)
            name = str(self.dataset.name)
            if name.endswith(LOCAL_SUFFIXES) and PartialState().is_main_process:  # one split, by any name
                rows = itertools.chain(*eval_datasets(eval_dataset))
                if shared := {*map(str, train_dataset)} & {*map(str, rows)}:
                    tell(
                        f"Rows to evaluate on are trained on, too ({len(shared)}): {name} has one split, of which "
                        "[:100] and [100:] are parts."
                    )
        elif self.training_args.eval_strategy != "no" or self.training_args.eval_on_start:
            names = ("eval_interval", "eval_strategy", "eval_on_start")
            name = next(name for name in names if self.values[self.algorithm].get(name) not in (None, "no"))
            raise ConfigError(
                f"`{self.algorithm}.{name}` needs an evaluation set: set `dataset.eval_split` if the task reads it, "
                "or remove it."
            )
        return train_dataset, eval_dataset

    def load_team(self, roles: Sequence[str], folder: str | None = None) -> AgentTeam:
        """Loads the team to train, or a saved team in its saved form; see [`~team.load.TeamLoader.load`]."""
        loader = self.loader if folder is None else self.loader.saved(folder)
        return loader.load(roles, self.dtype, self.compute_dtype, self.training_args.seed)

    def outline(self, roles: Sequence[str]) -> AgentTeam | None:
        """Builds the team to train without its weights. Returns `None` if it cannot be described without them."""
        if self.agent_model.is_quantized or is_deepspeed_zero3_enabled():
            return None
        team = self.loader.outline(roles, self.dtype)
        if team.has_adapters and self.peft_config is None:  # of a saved team: their weights are the reference policies
            return None
        team.freeze(self.training_args.frozen_agents or ())
        return team

    def describe(self, environment: Environment, train_dataset: Dataset, team: AgentTeam | None) -> dict[str, Any]:
        """Returns the settings that a checkpoint and all processes of the run must share."""
        args = self.training_args
        run = describe_run(type(args).__name__.removesuffix("Config"), environment.roles, team, train_dataset, args)
        return {**run, **describe_environment(environment)}


def prepare_run(settings: Settings, training_args: Any) -> PreparedRun:
    """
    Completes checked settings and the trainer's arguments on this machine. Raises `ConfigError` if a setting cannot
    work on it.
    """
    output = settings.output
    training_args.output_dir, checkpoint = choose_folder(settings, "mt_job" if training_args.num_turns > 1 else "job")
    if output.save_path and output.save_final_model:
        check_folder("`output.save_path`", Path(output.save_path))
    check_results(settings, training_args)
    if training_args.push_to_hub and not output.save_final_model:
        settings.notes.append("`output.save_final_model: false` has no effect: `push_to_hub` uploads the saved team.")
    # `config.yaml` describes the whole run, and is pushed
    for name in ("resume_from_checkpoint", "resume_changes", "hub_token"):
        pop_path(settings.merged, f"{settings.algorithm}.{name}")
    return PreparedRun(
        **vars(settings),
        training_args=training_args,
        peft_config=make_peft_config(settings),
        resume_from_checkpoint=checkpoint,
    )


def prepare_training(settings: Settings) -> PreparedRun:
    """Prepares a training on rollouts. Wrong settings end the program."""
    with end_on_wrong_input(settings.prog):
        training_args = make_training_args(settings)
        run = prepare_run(settings, training_args)
    start_logging(run, training_args.disable_tqdm)
    return run


def choose_folder(settings: Settings, prefix: str) -> tuple[str, str | None]:
    """
    Chooses the folder of the run, the same on all processes, and the checkpoint to resume from. Raises `ConfigError`
    if there is none.
    """
    output_dir, resume, name = settings.arguments.get("output_dir"), settings.extras.resume_from_checkpoint, run_id()
    names = [re.sub(r"[^\w.-]", "_", name) if name else f"{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}"]
    broadcast_object_list(names)
    folder = output_dir or str(Path(settings.output.base_dir) / f"{prefix}_{names[0]}")
    if isinstance(resume, str) and resume != AUTO:
        read_checkpoint(resume)  # the folder of a run is none
        return output_dir or str(Path(resume).resolve().parent), resume
    if resume and not settings.has_named_folder:
        raise ConfigError("`resume_from_checkpoint` continues the run that RUN_ID or `output_dir` names: set one.")
    last = last_checkpoint(folder)
    if resume is True and not last:
        raise ConfigError(f"`resume_from_checkpoint: true`, but there is no checkpoint in {folder}.")
    starts = ALGORITHMS[settings.algorithm].run == ROLLOUTS  # runs in phases skip those that are complete
    starts &= not (resume and last)
    if starts and not settings.dry_run:
        check_unused(Path(folder))
    if starts and last:
        settings.notes.append(
            f"{last} is not used: this run starts at step 0. `--resume_from_checkpoint auto` continues from it."
        )
    return folder, last if resume else None


def check_results(settings: Settings, args: Any) -> None:
    """
    Checks that the run can sample, and write, report and push its results. A dry run only notes what is missing,
    because it may run elsewhere.
    """
    setting = f"{settings.algorithm}.output_dir" if "output_dir" in settings.arguments else "output.base_dir"
    check_folder(f"`{setting}`", Path(args.output_dir))
    missing = [
        f"`{settings.algorithm}.report_to` has '{name}', which is not installed: pip install {name}."
        for name in sorted({*args.report_to} - {*get_available_reporting_integrations(), *NOT_DETECTED})
    ]
    if args.push_to_hub:
        check_repo_id(f"{settings.algorithm}.hub_model_id", args.hub_model_id or Path(args.output_dir).absolute().name)
        if args.hub_token is None and get_token() is None:
            missing.append(
                f"`{settings.algorithm}.push_to_hub` needs a token that may write: log in with `hf auth login`, or "
                "set HF_TOKEN."
            )
    if isinstance(args, RolloutConfig) and args.use_vllm:
        from trl_multiagent.trainers.base.vllm import check_machine

        try:
            check_machine(args)
        except (ImportError, ValueError) as error:
            missing.append(f"section `{settings.algorithm}`: {error}")
    if missing and not settings.dry_run:
        raise ConfigError(missing[0])
    settings.notes += missing


def start_logging(settings: Settings, disable_tqdm: bool) -> None:
    """Shows this package's messages and the notes about the settings, in the main process."""
    logging.basicConfig(format="%(message)s")
    if disable_tqdm:
        # A trainer's `disable_tqdm` does not hide those of other libraries, such as "Loading weights"
        disable_progress_bars()
        transformers_logging.disable_progress_bar()  # including the bars of the Hub's client
    if PartialState().is_main_process:
        logging.getLogger("trl_multiagent").setLevel(logging.INFO)
        for note in settings.notes:
            print(f"{settings.prog}: note: {note}", file=sys.stderr)


def first_rows(dataset: Any, number: int | None) -> Any:
    """Returns the first rows of a dataset, or of each in a dict; all of them if `number` is `None`."""
    if isinstance(dataset, dict):
        return {name: first_rows(rows, number) for name, rows in dataset.items()}
    return dataset if number is None else dataset.select(range(min(number, len(dataset))))


def check_team(run: PreparedRun, roles: Sequence[str]) -> AgentTeam | None:
    """
    Builds the team on the meta device, if that needs no download, so that wrong settings about models show before
    weights load. Returns `None` if it is not built, as in a dry run with a model that the task would have to train.
    """
    args, loader = run.training_args, run.loader
    if isinstance(args, ActorCriticConfig):
        model_names(args.critic_models, args.critic_names(roles))
    is_local = all(Path(name).is_dir() or (name in run.task.models and not run.dry_run) for name in run.model_list)
    if is_deepspeed_zero3_enabled() or not is_local or run.agent_model.gguf_file:
        return None
    try:
        with quiet_loading():
            team = loader.outline(roles, run.dtype)
        if loader.peft_config:
            for role in team.adapted_roles:
                check_adapter_names(loader.peft_config, cast(PeftModel, team.policies[role]))
    except Exception as error:  # transformers and PEFT raise errors of many kinds
        if "meta tensor" in str(error):  # the adapters, such as DoRA's, are computed from the weights
            return None
        settings = [f"`{run.names_models}: {loader.models}`"]
        settings += [f"`{x}.{name}`" for x in ("agent_model", "peft") for name in run.values[x] if name != "name"]
        problem = str(error) if isinstance(error, ValueError) else describe(error)
        raise ConfigError(f"the team cannot be built with {', '.join(settings)}: {problem}") from error
    if isinstance(args, ActorCriticConfig) and args.critic_form == "adapter" and not team.has_adapters:
        raise ConfigError(f"`{run.algorithm}.critic_form: adapter` needs LoRA agents: add the section `peft`.")
    return team


def check_run(run: PreparedRun, environment: Environment, train_dataset: Dataset) -> None:
    """
    Locks the folder of the run, and checks that all processes have the same settings and data, and that the checkpoint
    to resume from is complete and belongs to this run. This loads no model. If a check fails, the program ends on all
    processes.
    """
    state, checkpoint = PartialState(), run.resume_from_checkpoint
    with end_with_one_line(run.prog), end_on_wrong_input(run.prog), fail_together(state):
        if state.num_processes > 1:
            check_agreement(run.describe(environment, train_dataset, team=None))
        if checkpoint and ALGORITHMS[run.algorithm].run == ROLLOUTS:
            here = run.describe(environment, train_dataset, run.outline(environment.roles))
            changes = differences(read_checkpoint(checkpoint)["settings"], here)
            # The trainer compares the checksums; of a run on preferences, all of it
            check_changes(checkpoint, changes, run.training_args)
        if state.is_main_process:
            run.reservation.enter_context(
                locked(run.run_folder, f"choose another RUN_ID or `{run.algorithm}.output_dir`")
            )

"""One run of a recipe: it loads environment, data and team, checks that the run can succeed, trains, and saves the results."""

import contextlib
import dataclasses
import difflib
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import yaml
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModel, Trainer, TrainingArguments
from transformers.integrations import get_available_reporting_integrations, is_deepspeed_zero3_enabled
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import is_torch_bf16_gpu_available
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.function_environment import FunctionEnvironment
from trl_multiagent.environments.task import DatasetSource, Task, TaskSettings
from trl_multiagent.environments.task_errors import TaskError, describe
from trl_multiagent.file_names import CARD_FILE, CURVE_FILE, RECIPE_FILE
from trl_multiagent.folders import locked, write_text
from trl_multiagent.identity import describe_environment, differences
from trl_multiagent.models.positions import check_prompts
from trl_multiagent.models.pretrained import quiet_loading
from trl_multiagent.processes import check_agreement, fail_together
from trl_multiagent.quiet import hide_progress_bars
from trl_multiagent.recipe.results import (
    check_folder,
    check_model_folder,
    check_push,
    check_repo_id,
    check_team_folder,
    try_folders,
)
from trl_multiagent.recipe.tasks import make_environment
from trl_multiagent.report.model_card import hub_id, rename_card
from trl_multiagent.settings.derive import Settings, check_names
from trl_multiagent.settings.read import ConfigError, fail, pop_path
from trl_multiagent.settings.schema import PEFT_DEFAULTS, AgentModel, Output, Wandb
from trl_multiagent.stopping import ending_later
from trl_multiagent.team.adapters import check_adapter_config, check_adapter_names
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.team.critics import model_names
from trl_multiagent.team.files import AGENTS_FOLDER, SHARED_FOLDER, AgentSource, load_tokenizer
from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig
from trl_multiagent.trainers.base.checkpoint_files import STATE_FILE, read_checkpoint, verify_checkpoint
from trl_multiagent.trainers.base.progress import show_one_bar
from trl_multiagent.trainers.base.rescue import WriteError
from trl_multiagent.trainers.base.rollout_config import RolloutConfig
from trl_multiagent.trainers.base.rollout_metrics import EVAL_METRICS, is_eval_metric
from trl_multiagent.trainers.base.run_settings import check_changes, check_steps, describe_run


NOT_DETECTED = (
    "azure_ml",
    "flyte",
)  # values of `report_to` about which transformers does not say whether they are installed


@dataclasses.dataclass
class Recipe:
    """
    The checked settings of one run.

    Args:
        algorithm (`str`): Name of the algorithm's section.
        task ([`~trl_multiagent.environments.task.Task`]): What the team is trained on.
        merged (`dict`): All settings that were given, under the names of this release; the content of the run's `config.yaml`.
        training_args ([`RolloutConfig`]): The trainer's arguments. `output_dir` is the folder of the run.
        num_agents (`int`): Number of agents.
        model_names (`str` or `list[str]`): The model id or folder from which all agents start, or one per agent.
        peft_config ([`~peft.LoraConfig`], *optional*): The adapter of every agent of a LoRA team.
        sections (`dict[str, Any]`): For each section, an instance of its dataclass.
        eval_num_samples (`int`, *optional*): Evaluate on the first n items only.
        dry_run (`bool`): Whether to print the plan and stop.
        resume_from_checkpoint (`str`, *optional*): Folder of the checkpoint to continue from.
        notes (`list[str]`): Messages to the user about the settings.
        settings ([`~trl_multiagent.settings.derive.Settings`]): The settings that all of this was made of.
        prog (`str`): Name of the program in messages.
        reservation (`contextlib.ExitStack`): A context that the run ends in. It gives the folder of the run free, which
            [`~Recipe.check_run`] reserves.
    """

    algorithm: str
    task: Task
    merged: dict[str, Any]
    training_args: RolloutConfig
    num_agents: int
    model_names: str | list[str]
    peft_config: LoraConfig | None
    sections: dict[str, Any]
    eval_num_samples: int | None
    dry_run: bool
    resume_from_checkpoint: str | None
    notes: list[str]
    settings: Settings
    prog: str = "recipe"
    reservation: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    # Arguments whose keys or entries are roles
    role_arguments: ClassVar[tuple[str, ...]] = ("frozen_agents", "agent_learning_rates", "vllm_server_base_urls")

    @property
    def agent_model(self) -> AgentModel:
        return self.sections["agent_model"]

    @property
    def dataset(self) -> DatasetSource:
        return self.sections["dataset"]

    @property
    def output(self) -> Output:
        return self.sections["output"]

    @property
    def wandb(self) -> Wandb:
        return self.sections["wandb"]

    @property
    def task_settings(self) -> TaskSettings:
        """The argument of the task's functions."""
        sections = {name: self.sections[name] for name in ("dataset", *self.task.settings)}
        return TaskSettings(sections, self.num_agents, self.run_folder)

    @property
    def run_folder(self) -> Path:
        return Path(self.training_args.output_dir)

    @property
    def team_folder(self) -> Path:
        """Folder of the trained team: the run's, so that one folder holds all results and can be pushed, or `output.save_path`."""
        if self.output.save_path and self.output.save_final_model:
            return Path(self.output.save_path)
        return self.run_folder

    @property
    def saves_team(self) -> bool:
        """Whether the trained team is saved. A push uploads saved files, so a team that is pushed is always saved."""
        return self.output.save_final_model or self.training_args.push_to_hub

    @property
    def dtype(self) -> str:
        """Data type of the weights that are trained."""
        rounds = self.training_args.rounds_stochastically and self.peft_config is None
        return "bfloat16" if rounds else "float32"

    @property
    def base_dtype(self) -> str:
        """Data type of the base of a LoRA team."""
        return self.agent_model.torch_dtype or "float32"

    @property
    def compute_dtype(self) -> str:
        """Data type of matrix products."""
        return "bfloat16" if self.training_args.bf16 else "float16" if self.training_args.fp16 else "float32"

    @property
    def form_in_words(self) -> str:
        """The form of the team and its data types, for a plan."""
        weights = f"{self.dtype} weights"
        if self.peft_config is not None:
            weights = f"LoRA of rank {self.peft_config.r} in float32 on a {self.base_dtype} base"
        form = ", one model for all" if self.agent_model.share_weights else ""
        return f"{weights}, computed in {self.compute_dtype}{form}"

    @property
    def model_init_kwargs(self) -> dict[str, Any]:
        """The arguments for loading models and tokenizers that the user gave."""
        kwargs = self.agent_model.tokenizer_kwargs
        return loading_arguments(self.agent_model) | ({"tokenizer_kwargs": kwargs} if kwargs else {})

    @property
    def items_per_step(self) -> int:
        """Number of items in one optimizer step, over all processes."""
        return self.training_args.items_per_device * self.training_args.world_size

    def make_environment(self) -> Environment:
        """
        Makes the task's environment.

        Raises:
            ConfigError: the number of its roles is not `num_agents`, or a setting names another role.
        """
        environment = make_environment(self.settings, self.run_folder)
        roles = environment.roles
        args = self.training_args
        try:
            environment.check_turns(args.num_turns)
        except ValueError as error:
            raise ConfigError(f"section `{self.algorithm}`: {error}") from error
        if isinstance(args, RolloutConfig) and "metric_for_best_model" in self.settings.arguments:
            self.check_best_metric(environment)
        for name in self.role_arguments:
            unknown = [role for role in getattr(args, name) or () if role not in roles]
            if unknown:
                raise ConfigError(
                    f"`{self.algorithm}.{name}` names {unknown[0]!r}, which is no role of the task: {', '.join(roles)}."
                )
        if set(roles) <= set(args.frozen_agents or ()):
            raise ConfigError(f"`{self.algorithm}.frozen_agents` has all roles, so there is nothing to train.")
        useless = sorted({*(args.frozen_agents or ())} & {*(args.agent_learning_rates or ())})
        if useless:
            raise ConfigError(
                f"`{self.algorithm}.agent_learning_rates` has {useless[0]!r}, which is in `frozen_agents`."
            )
        if args.agent_learning_rates and self.agent_model.share_weights:
            raise ConfigError(
                f"`{self.algorithm}.agent_learning_rates` needs agents with separate weights, but "
                "`agent_model.share_weights` is set; set one `learning_rate`."
            )
        return environment

    def check_best_metric(self, environment: Environment) -> None:
        """
        Refuses a `metric_for_best_model` that is not a metric of an evaluation. Reward functions may log metrics with any name, so
        for them there is only a note.

        Raises:
            ConfigError: there is no such metric.
        """
        metric = str(self.training_args.metric_for_best_model).removeprefix("eval_")
        if is_eval_metric(metric, environment.roles, self.training_args.num_turns):
            return
        setting = f"`{self.algorithm}.metric_for_best_model` is {metric!r}"
        similar = difflib.get_close_matches(metric, EVAL_METRICS, n=1)
        advice = f"did you mean '{similar[0]}'?" if similar else f"choose one such as {', '.join(EVAL_METRICS[:3])}."
        if similar or not isinstance(environment.unwrapped, FunctionEnvironment):
            raise ConfigError(f"{setting}, which is no metric of an evaluation; {advice}")
        if self.training_args.process_index == 0:
            print(f"{self.prog}: note: {setting}: a reward function has to log it.", file=sys.stderr)

    def start_logging(self) -> None:
        """Shows this package's messages and the notes about the settings, and progress bars unless `disable_tqdm` is set."""
        logging.basicConfig(format="%(message)s")
        if self.training_args.disable_tqdm:
            hide_progress_bars()
        if self.training_args.process_index == 0:
            logging.getLogger("trl_multiagent").setLevel(logging.INFO)
            for note in self.notes:
                print(f"{self.prog}: note: {note}", file=sys.stderr)

    def introduce(self) -> None:
        """Prints the task's introduction, if it has one."""
        text = self.task.introduction(self.task_settings) if self.task.introduction is not None else None
        if text is not None and self.training_args.process_index == 0:
            print(text, flush=True)

    def load_datasets(self) -> tuple[Dataset, Dataset | None]:
        """
        Loads the task's training set and, if it has one, its evaluation set; of each, the first rows only if the settings say so.

        Raises:
            ConfigError: the data cannot be read, or has fewer items than one optimizer step takes.
        """
        try:
            train_dataset, eval_dataset = self.task.load_datasets(self.task_settings)
        except (ConnectionError, TaskError):
            raise
        except (ValueError, OSError) as error:
            raise ConfigError(f"section `dataset`: {error}") from error
        train_dataset = first_rows(train_dataset, self.dataset.size)
        if len(train_dataset) < self.items_per_step:
            raise ConfigError(
                f"`dataset.train_split` selects {len(train_dataset)} items, fewer than the {self.items_per_step} of one "
                f"optimizer step. Lower `{self.algorithm}.items_per_device`."
            )
        if eval_dataset is not None:
            eval_dataset = first_rows(first_rows(eval_dataset, self.dataset.eval_size), self.eval_num_samples)
        return train_dataset, eval_dataset

    def models(self) -> str | list[str]:
        """The models for `AgentTeam.from_pretrained`. A base model of the task is built if it does not exist yet."""
        names = [self.model_names] if isinstance(self.model_names, str) else self.model_names
        built = {}
        for name in [name for name in dict.fromkeys(names) if name in self.task.models]:
            with self.training_args.main_process_first(desc="building the base model"):
                built[name] = self.task.models[name]()
        if isinstance(self.model_names, str):
            return built.get(self.model_names, self.model_names)
        return [built.get(name, name) for name in self.model_names]

    def load_team(self, roles: Sequence[str], folder: str | None = None) -> AgentTeam:
        """
        Loads the team to train: full models, one model for all agents, or LoRA adapters.

        Args:
            roles (`Sequence[str]`): The roles.
            folder (`str`, *optional*): Folder of a saved team to load instead, with the form in which it was saved.
        """
        model = self.agent_model
        try:
            return AgentTeam.from_pretrained(
                self.models() if folder is None else folder,
                roles,
                peft_config=self.peft_config if folder is None else None,
                share_weights=model.share_weights and folder is None,
                seed=self.training_args.seed,
                dtype=self.dtype,
                base_dtype=self.base_dtype,
                **quantization(model, self.compute_dtype),
                **self.model_init_kwargs,
            )
        except (OSError, ValueError, ImportError, TypeError) as error:  # a model on the Hub is not checked before
            names = self.model_names if folder is None else folder
            raise ConfigError(f"the team cannot be loaded from {names!r}: {describe(error)}") from error

    def check_team(self, roles: Sequence[str]) -> None:
        """
        Describes the team without its weights, if its models are in local folders or built by the task, so that what transformers and
        PEFT refuse is known before anything is loaded.

        Args:
            roles (`Sequence[str]`): The roles.

        Raises:
            ConfigError: the team cannot be made; the message names the setting at fault.
        """
        self.check_critics(roles)
        names = self.model_names if isinstance(self.model_names, list) else [self.model_names]
        built = all(name in self.task.models for name in names)
        if built and self.peft_config is None and not self.model_init_kwargs:
            return  # no setting can be wrong
        if is_deepspeed_zero3_enabled() or not all(name in self.task.models or Path(name).is_dir() for name in names):
            return
        problem = self.problem_of_team(roles, self.peft_config, self.model_init_kwargs)
        if problem is not None:
            raise ConfigError(f"{self.setting_at_fault(roles)}: {problem}")

    def check_critics(self, roles: Sequence[str]) -> None:
        """
        Checks that there is a model for every critic, and describes those in local folders without their weights. Of models on the
        Hub, the configuration and the tokenizer are loaded, but not for a dry run.

        Raises:
            ConfigError: the number of models is wrong, or one of them cannot be loaded.
        """
        args = self.training_args
        if not isinstance(args, ActorCriticConfig) or args.critic_models is None:
            return
        names = args.critic_names([role for role in roles if role not in (args.frozen_agents or ())])
        try:
            sources = model_names(args.critic_models, names)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for source in [source for source in dict.fromkeys(sources.values()) if source is not None]:
            is_local = Path(source).is_dir()
            if self.dry_run and not is_local:
                continue
            try:
                with quiet_loading():
                    load_tokenizer(AgentSource(source), {})
                    AutoConfig.from_pretrained(source)
                    if is_local and not is_deepspeed_zero3_enabled():
                        AutoModel.from_pretrained(source, device_map="meta")
            except Exception as error:  # transformers raises errors of many kinds
                raise ConfigError(f"a critic cannot be loaded from {source!r}: {describe(error)}") from error

    def problem_of_team(
        self, roles: Sequence[str], peft_config: LoraConfig | None, model_init_kwargs: dict[str, Any]
    ) -> str | None:
        """Why there can be no team with these adapters and arguments; `None` if there can be."""
        models = self.models()
        try:
            with quiet_loading():
                team = AgentTeam.from_pretrained(
                    models,
                    roles,
                    peft_config=peft_config,
                    share_weights=self.agent_model.share_weights,
                    **{"device_map": "meta", "dtype": self.dtype, **model_init_kwargs},
                )
            for role in roles:
                check_prompts(role, team.agents[role], [], [], self.training_args.max_completion_length)
            if peft_config is not None:
                for model in team.policies.values():
                    check_adapter_names(peft_config, cast(PeftModel, model))
        except Exception as error:  # transformers and PEFT raise errors of many kinds
            if "meta tensor" in str(error):  # the adapters, such as DoRA's, are computed from the weights
                return None
            return str(error) if isinstance(error, ValueError) else describe(error)
        return None

    def setting_at_fault(self, roles: Sequence[str]) -> str:
        """The first setting without which there could be a team."""
        if self.problem_of_team(roles, None, {}) is not None:
            return f"`{'agent_model.name' if self.settings.agents is None else 'agents'}: {self.model_names}`"
        kwargs = self.model_init_kwargs
        if self.problem_of_team(roles, None, kwargs) is not None:
            for name, value in kwargs.items():
                if self.problem_of_team(roles, None, {k: v for k, v in kwargs.items() if k != name}) is None:
                    own = name in vars(self.agent_model)
                    return f"`agent_model.{'' if own else 'model_init_kwargs.'}{name}: {value}`"
            return "`agent_model`"
        for path in adapter_settings(self.settings):
            section, name = path.split(".")
            config = make_peft_config(self.settings, without=name)
            if self.problem_of_team(roles, config, kwargs) is None:
                values = vars(self.agent_model) if section == "agent_model" else self.settings.values[section]
                return f"`{path}: {values[name]}`"
        return "section `peft`" if self.settings.has_peft_section else "section `agent_model`"

    def outline(self, roles: Sequence[str]) -> AgentTeam | None:
        """The team to train, without its weights; `None` if the team cannot be described without loading its weights."""
        model = self.agent_model
        if model.is_quantized or is_deepspeed_zero3_enabled():
            return None
        team = AgentTeam.from_pretrained(
            self.models(),
            roles,
            peft_config=self.peft_config,
            share_weights=model.share_weights,
            device_map="meta",
            **self.model_init_kwargs,
        )
        if (
            team.has_adapters and self.peft_config is None
        ):  # adapters of a saved team: their weights are the reference policies
            return None
        team.freeze(self.training_args.frozen_agents or ())
        return team

    def check_run(self, environment: Environment, train_dataset: Dataset) -> None:
        """
        Checks that all processes have the same settings and data, that the checkpoint to continue from is complete and belongs to this
        run, and that the results can be written, and reserves the folder of the run. No model is loaded for this. If a check fails, the
        program ends on all processes.

        Args:
            environment ([`Environment`]): The run's environment.
            train_dataset ([`~datasets.Dataset`]): The items to train on.
        """
        state = PartialState()
        if state.num_processes > 1:
            try:
                check_agreement(state, self.describe(environment, train_dataset, team=None))
            except ValueError as error:  # on all processes
                fail(self.prog, ConfigError(str(error)))
        problems = []
        try:
            if self.resume_from_checkpoint is not None:
                self.check_checkpoint(self.resume_from_checkpoint, environment, train_dataset)
            if self.training_args.process_index == 0:
                folder = SHARED_FOLDER if self.agent_model.share_weights else None
                try_folders(
                    self.run_folder,
                    self.team_folder if self.saves_team else None,
                    [f"{AGENTS_FOLDER}/{folder or role}" for role in environment.roles],
                )
                advice = f"choose another RUN_ID or `{self.algorithm}.output_dir`"
                self.reservation.enter_context(locked(self.run_folder, advice))
        except ValueError as error:
            problems = [str(error)]
        problems = list(dict.fromkeys(gather_object(problems)))
        if problems:
            fail(self.prog, ConfigError(" ".join(problems)))

    def check_checkpoint(self, folder: str, environment: Environment, train_dataset: Dataset) -> None:
        """
        Compares the run with the checkpoint that it continues. Weights that are not trained are not compared.

        Raises:
            ValueError: the checkpoint is damaged, belongs to another run, or has already taken all steps.
        """
        args = self.training_args
        saved = verify_checkpoint(folder)
        if not self.results_are_missing(folder):
            check_steps(folder, saved["global_step"], len(train_dataset), args)
        here = self.describe(environment, train_dataset, self.outline(environment.roles))
        check_changes(folder, differences(saved["settings"], here), args)

    def describe(self, environment: Environment, train_dataset: Dataset, team: AgentTeam | None) -> dict[str, Any]:
        """The settings of the run that a checkpoint, and all processes, must share."""
        args = self.training_args
        trainer_name = type(args).__name__.removesuffix("Config")
        run = describe_run(trainer_name, environment.roles, team, train_dataset, args)
        return {**run, **describe_environment(environment)}

    def results_are_missing(self, checkpoint: str) -> bool:
        """Whether a run was interrupted after a checkpoint and before the team's card, which is saved last, was there."""
        if not self.saves_team:
            return False
        card = self.team_folder / CARD_FILE
        return not card.is_file() or card.stat().st_mtime < (Path(checkpoint) / STATE_FILE).stat().st_mtime

    def train_and_save(self, trainer: Trainer) -> None:
        """
        Trains the team. Saves the merged settings in the run's folder and, unless `output.save_final_model` is false, the team, its
        model card and its learning curve in the team's folder. A run that was interrupted while it saved them saves them now.

        If the team cannot be saved in its folder, it is saved in another place.

        Raises:
            WriteError or OtherProcessError: the team could not be saved in its folder; the first one in the process that saves, the other one
                in all others. The message names the other place.
        """
        accelerator = trainer.accelerator
        set_up_wandb(self.wandb)
        with fail_together(accelerator):
            if trainer.is_world_process_zero():
                self.run_folder.mkdir(parents=True, exist_ok=True)
                write_text(self.run_folder / RECIPE_FILE, yaml.safe_dump(self.merged, sort_keys=False))
        show_progress(trainer)
        if self.task.callbacks is not None:
            for callback in self.task.callbacks(self.task_settings, trainer):
                trainer.add_callback(callback)
        checkpoint = self.resume_from_checkpoint
        if checkpoint is not None and self.results_are_missing(checkpoint):
            trainer.may_be_complete = True
        with ending_later():  # a training that is complete is saved
            trainer.train(resume_from_checkpoint=checkpoint)
            self.save_results(trainer)

    def save_results(self, trainer: Trainer) -> None:
        """Saves and pushes the trained team, as far as the settings ask for it; see [`~Recipe.train_and_save`]."""
        if not self.saves_team:
            return
        name = self.dataset.name
        dataset_name = hub_id(name) if name and self.dataset.may_be_hub_id else None
        with fail_together(trainer.accelerator):
            trainer.save_model(str(self.team_folder), _internal_call=True)  # this does not push
        with fail_together(trainer.accelerator):
            self.write_card(trainer, dataset_name)
        if trainer.is_world_process_zero():
            print(f"Saved team       {self.team_folder}", flush=True)
        if self.training_args.push_to_hub:  # last, so that nothing is lost if the push fails
            trainer.push_to_hub(dataset_name=dataset_name)

    def write_card(self, trainer: Trainer, dataset_name: str | None) -> None:
        """
        Writes the model card and the learning curve to the team's folder, and copies the settings.

        Raises:
            WriteError: a file could not be written.
        """
        try:
            trainer.create_model_card(dataset_name=dataset_name)
            if trainer.is_world_process_zero() and self.team_folder.absolute() != self.run_folder.absolute():
                copy_run_files(self.run_folder, self.team_folder)
        except OSError as error:
            raise WriteError(
                f"The model card could not be written ({error}). The team itself is in {self.team_folder.absolute()}."
            ) from error


def show_progress(trainer: Any) -> None:
    """In a terminal, replaces the entries of the log by one bar, with the metrics that the environment of a team trainer watches."""
    if sys.stderr.isatty():
        environment = trainer.environment  # `None` where preferences are trained on without one
        show_one_bar(trainer, [] if environment is None else list(environment.unwrapped.watched_metrics))


def loading_arguments(model: AgentModel) -> dict[str, Any]:
    """The arguments for loading models that the user gave."""
    given: dict[str, Any] = {"revision": model.revision, "attn_implementation": model.attn_implementation}
    given["trust_remote_code"] = model.trust_remote_code or None
    return {name: value for name, value in given.items() if value is not None} | (model.model_init_kwargs or {})


def sampling_dtype(model: AgentModel, device: torch.device) -> str:
    """The data type of a team that is not trained: `agent_model.torch_dtype`, or that in which a team is trained by default."""
    has_bf16 = device.type != "cpu" and is_torch_bf16_gpu_available()
    return model.torch_dtype or ("bfloat16" if has_bf16 else "float32")


def quantization(model: AgentModel, compute_dtype: str) -> dict[str, Any]:
    """The argument for loading the base of a LoRA team in few bits, if the settings ask for it."""
    if not model.is_quantized:
        return {}
    return {
        "quantization_config": get_quantization_config(
            ModelConfig(dtype=compute_dtype, **model.quantization_arguments)
        )
    }


def build_recipe(settings: Settings, training_args: RolloutConfig, dry_run: bool = False) -> Recipe:
    """
    Makes a recipe from checked settings.

    Args:
        settings ([`~trl_multiagent.settings.derive.Settings`]): The settings.
        training_args ([`RolloutConfig`]): The trainer's arguments, from
            [`~trl_multiagent.settings.derive.make_training_args`]. Their `output_dir` is set to the folder of the run.
        dry_run (`bool`, *optional*, defaults to `False`): Whether the run only prints its plan.

    Raises:
        ConfigError: a setting cannot work on this machine, or contradicts another one.
    """
    algorithm, merged, values, notes = settings.algorithm, settings.merged, settings.values, list(settings.notes)
    output: Output = settings.sections["output"]
    names = settings.model_names if isinstance(settings.model_names, list) else [settings.model_names]
    check_models("agent_model.name" if settings.agents is None else "agents", names, settings.task)
    if "report_to" in values[algorithm]:
        check_reports(algorithm, training_args)
    elif not_installed(training_args):
        problem = "`wandb` is not installed: pip install wandb, or set `wandb.project` to null."
        if not dry_run:  # a plan can be made on another machine than the one that trains
            raise ConfigError(problem)
        notes.append(problem)

    training_args.output_dir, resume_from_checkpoint = choose_folder(
        output_dir=values[algorithm].get("output_dir"),
        base_dir=output.base_dir,
        prefix="mt_job" if training_args.num_turns > 1 else "job",
        resume=settings.extras.resume_from_checkpoint,
    )
    run_folder = Path(training_args.output_dir)
    check_folder(f"`{algorithm}.output_dir`" if "output_dir" in values[algorithm] else "`output.base_dir`", run_folder)
    if output.save_path and output.save_final_model:
        check_folder("`output.save_path`", Path(output.save_path))
        check_team_folder(Path(output.save_path), run_folder)
    for name in ("hub_model_id", "log_completions_hub_repo"):
        repo_id = settings.arguments.get(name)
        if repo_id is not None:
            check_repo_id(f"{algorithm}.{name}", repo_id)
    if training_args.push_to_hub:
        missing = check_push(algorithm, training_args)
        if missing is not None and not dry_run:
            raise ConfigError(missing)
        notes += [missing] if missing else []
        if not output.save_final_model:
            notes.append(
                f"`output.save_final_model: false` has no effect: `{algorithm}.push_to_hub` uploads the saved team."
            )
    pop_path(merged, f"{algorithm}.resume_from_checkpoint")  # config.yaml describes the whole run
    pop_path(merged, f"{algorithm}.resume_changes")
    pop_path(merged, f"{algorithm}.hub_token")  # config.yaml is pushed, so it must not hold secrets
    return Recipe(
        algorithm=algorithm,
        task=settings.task,
        merged=merged,
        training_args=training_args,
        num_agents=settings.num_agents,
        model_names=settings.model_names,
        peft_config=make_peft_config(settings),
        sections=settings.sections,
        eval_num_samples=settings.extras.eval_num_samples,
        dry_run=dry_run,
        resume_from_checkpoint=resume_from_checkpoint,
        notes=notes,
        settings=settings,
    )


def check_models(setting: str, names: Sequence[str], task: Task) -> None:
    """
    Refuses models that cannot exist. Those that the task builds are not checked.

    Args:
        setting (`str`): The setting that names the models, for the message.
        names (`Sequence[str]`): Model ids and folders.
        task ([`~trl_multiagent.environments.task.Task`]): The task.

    Raises:
        ConfigError: there is no such folder, a folder holds no model, or a text is no id.
    """
    for name in [name for name in names if name not in task.models]:
        check_names(name, None, setting)
        if Path(name).is_dir():
            check_model_folder(setting, Path(name))
        else:
            check_repo_id(setting, name)


def not_installed(args: TrainingArguments) -> list[str]:
    """The trackers in `report_to` that are not installed."""
    return sorted({*args.report_to} - {*get_available_reporting_integrations(), *NOT_DETECTED})


def check_reports(algorithm: str, args: TrainingArguments) -> None:
    """Refuses trackers in `report_to` that are not installed."""
    for name in not_installed(args):
        raise ConfigError(f"`{algorithm}.report_to` has '{name}', which is not installed: pip install {name}.")


def first_rows(dataset: Dataset, number: int | None) -> Dataset:
    """The first rows of a dataset; all of them if `number` is `None`."""
    return dataset if number is None else dataset.select(range(min(number, len(dataset))))


def adapter_settings(settings: Settings) -> list[str]:
    """The paths of the settings of the adapters that were given."""
    if settings.has_peft_section:
        return [f"peft.{name}" for name in settings.values["peft"]]
    return [f"agent_model.{name}" for name in settings.sections["agent_model"].lora_arguments]


def make_peft_config(settings: Settings, without: str | None = None) -> LoraConfig | None:
    """
    The adapter of every agent: from the section `peft`, or by TRL from `agent_model`.

    Args:
        settings ([`~trl_multiagent.settings.derive.Settings`]): The settings.
        without (`str`, *optional*): The name of a setting to ignore.

    Raises:
        ConfigError: PEFT refuses a value, or a team cannot have this adapter.
    """
    model: AgentModel = settings.sections["agent_model"]
    where = "peft" if settings.has_peft_section else "agent_model"
    try:
        if settings.has_peft_section:
            given = {**PEFT_DEFAULTS, **{k: v for k, v in settings.values["peft"].items() if k != without}}
            config = LoraConfig(**given)
        else:
            arguments = {k: v for k, v in model.lora_arguments.items() if k != without}
            config = get_peft_config(ModelConfig(use_peft=model.use_peft, **arguments))
            names = arguments.get("lora_target_modules") or []
            if config is not None and len(names) == 1 and names[0].isidentifier():
                config.target_modules = {
                    *names
                }  # TRL makes it a text, which PEFT compares with whole paths of modules
        if config is not None:
            check_adapter_config("every agent", config)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"section `{where}`: {error}") from error
    return config


def copy_run_files(run_folder: Path, team_folder: Path) -> None:
    """Copies the settings, the model card and the learning curve of a run to the folder of its team."""
    for name in (RECIPE_FILE, CARD_FILE, CURVE_FILE):
        if (run_folder / name).is_file():
            shutil.copy(run_folder / name, team_folder / name)
    rename_card(team_folder, str(team_folder.absolute()))


def choose_folder(
    output_dir: str | None, base_dir: str, prefix: str, resume: str | bool | None
) -> tuple[str, str | None]:
    """
    Chooses the folder of the run, the same on all processes, and the checkpoint to continue from.

    Raises:
        ConfigError: there is no complete checkpoint where `resume` says.
    """
    run_id = os.environ.get("RUN_ID") or os.environ.get("JOB_ID")
    names = [re.sub(r"[^\w.-]", "_", run_id) if run_id else f"{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}"]
    broadcast_object_list(names)
    folder = output_dir or str(Path(base_dir) / f"{prefix}_{names[0]}")
    if not resume:
        return folder, None
    if isinstance(resume, str):
        if not Path(resume).is_dir():
            raise ConfigError(f"`resume_from_checkpoint` is {resume!r}, but there is no such folder.")
        check_complete(resume)
        return output_dir or str(Path(resume).parent), resume
    if output_dir is None and run_id is None:
        raise ConfigError(
            "`resume_from_checkpoint: true` continues the run that the environment variable RUN_ID or `output_dir` "
            "names; set one of them, or give the folder of a checkpoint."
        )
    checkpoint = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    if checkpoint is None:
        raise ConfigError(f"`resume_from_checkpoint: true`, but there is no checkpoint in {folder}.")
    check_complete(checkpoint)
    return folder, checkpoint


def check_complete(checkpoint: str) -> None:
    """Refuses a folder that is not a complete checkpoint."""
    try:
        read_checkpoint(checkpoint)
    except ValueError as error:
        raise ConfigError(f"`resume_from_checkpoint`: {error}") from error


def set_up_wandb(wandb: Wandb) -> None:
    """Sets the environment variables that Weights & Biases reads."""
    variables = {
        "WANDB_PROJECT": wandb.project,
        "WANDB_ENTITY": wandb.entity,
        "WANDB_DIR": wandb.dir,
        "WANDB_TAGS": ",".join(wandb.tags or []),
        "WANDB_RUN_ID": wandb.id,
        "WANDB_RESUME": "auto" if wandb.resume is True else wandb.resume,
    }
    os.environ.update({name: value for name, value in variables.items() if value})

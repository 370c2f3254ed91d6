"""Checks, before the weights of a model are loaded, that a run can succeed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftModel
from transformers import AutoConfig, AutoModel, TrainingArguments
from transformers.integrations import get_available_reporting_integrations, is_deepspeed_zero3_enabled

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.task_errors import describe
from trl_multiagent.folders import locked
from trl_multiagent.jobs.processes import check_agreement
from trl_multiagent.models.positions import check_prompts
from trl_multiagent.models.pretrained import quiet_loading
from trl_multiagent.settings.read import ConfigError, fail
from trl_multiagent.team.adapters import check_adapter_names
from trl_multiagent.team.critics import model_names
from trl_multiagent.team.files import AgentSource, load_tokenizer
from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig


if TYPE_CHECKING:
    from trl_multiagent.recipe.recipe import Recipe


NOT_DETECTED = (
    "azure_ml",
    "flyte",
)  # values of `report_to` of which transformers does not know whether they are installed


def check_team(recipe: Recipe, roles: Sequence[str]) -> None:
    """
    Builds the team on the meta device, if its models are in local folders or built by the task, so that errors of transformers and PEFT
    surface before any weights load.

    Args:
        recipe ([`~trl_multiagent.recipe.recipe.Recipe`]): The settings.
        roles (`Sequence[str]`): The roles.

    Raises:
        ConfigError: the team cannot be made; the message names the settings about models.
    """
    check_critics(recipe, roles)
    loader = recipe.loader
    names = loader.models if isinstance(loader.models, list) else [loader.models]
    if all(name in loader.builders for name in names) and loader.peft_config is None and not loader.arguments:
        return  # no setting can be wrong
    is_local = all(name in loader.builders or Path(name).is_dir() for name in names)
    if is_deepspeed_zero3_enabled() or not is_local:
        return
    try:
        with quiet_loading():
            team = loader.outline(roles, recipe.dtype)
        for role in roles:
            check_prompts(role, team.agents[role], [], [], recipe.training_args.max_completion_length)
        if loader.peft_config is not None:
            for model in team.policies.values():
                check_adapter_names(loader.peft_config, cast(PeftModel, model))
    except Exception as error:  # transformers and PEFT raise errors of many kinds
        if "meta tensor" in str(error):  # the adapters, such as DoRA's, are computed from the weights
            return
        settings = recipe.settings
        source = "agent_model.name" if settings.agents is None else "agents"
        others = [f"`{x}.{name}`" for x in ("agent_model", "peft") for name in settings.values[x] if name != "name"]
        problem = str(error) if isinstance(error, ValueError) else describe(error)
        raise ConfigError(
            f"the team cannot be built with {', '.join([f'`{source}: {loader.models}`', *others])}: {problem}"
        ) from error


def check_critics(recipe: Recipe, roles: Sequence[str]) -> None:
    """
    Checks that there is a model for every critic, and describes those in local folders without their weights. Of models on the
    Hub, the configuration and the tokenizer are loaded, but not for a dry run.

    Raises:
        ConfigError: the number of models is wrong, or one of them cannot be loaded.
    """
    args = recipe.training_args
    if not isinstance(args, ActorCriticConfig) or args.critic_models is None:
        return
    names = args.critic_names([role for role in roles if role not in (args.frozen_agents or ())])
    try:
        sources = model_names(args.critic_models, names)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for source in [source for source in dict.fromkeys(sources.values()) if source is not None]:
        is_local = Path(source).is_dir()
        if recipe.dry_run and not is_local:
            continue
        try:
            with quiet_loading():
                load_tokenizer(AgentSource(source), {})
                AutoConfig.from_pretrained(source)
                if is_local and not is_deepspeed_zero3_enabled():
                    AutoModel.from_pretrained(source, device_map="meta")
        except Exception as error:  # transformers raises errors of many kinds
            raise ConfigError(f"a critic cannot be loaded from {source!r}: {describe(error)}") from error


def check_run(recipe: Recipe, environment: Environment, train_dataset: Dataset) -> None:
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
            check_agreement(state, recipe.describe(environment, train_dataset, team=None))
        except ValueError as error:  # on all processes
            fail(recipe.prog, ConfigError(str(error)))
    problems = []
    try:
        if recipe.resume_from_checkpoint is not None:
            recipe.check_checkpoint(recipe.resume_from_checkpoint, environment, train_dataset)
        if recipe.training_args.process_index == 0:
            advice = f"choose another RUN_ID or `{recipe.algorithm}.output_dir`"
            recipe.reservation.enter_context(locked(recipe.run_folder, advice))
    except (ValueError, OSError) as error:
        problems = [str(error)]
    problems = list(dict.fromkeys(gather_object(problems)))
    if problems:
        fail(recipe.prog, ConfigError(" ".join(problems)))


def not_installed(args: TrainingArguments) -> list[str]:
    """The trackers in `report_to` that are not installed."""
    return sorted({*args.report_to} - {*get_available_reporting_integrations(), *NOT_DETECTED})


def check_reports(algorithm: str, args: TrainingArguments) -> None:
    """Refuses trackers in `report_to` that are not installed."""
    for name in not_installed(args):
        raise ConfigError(f"`{algorithm}.report_to` has '{name}', which is not installed: pip install {name}.")

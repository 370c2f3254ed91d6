"""Checks, before the weights of a model are loaded, that a run can succeed."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftModel
from transformers.integrations import is_deepspeed_zero3_enabled

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.task_errors import describe
from trl_multiagent.folders import locked
from trl_multiagent.jobs.processes import check_agreement
from trl_multiagent.models.positions import check_prompts
from trl_multiagent.models.pretrained import quiet_loading
from trl_multiagent.recipe.recipe import Recipe
from trl_multiagent.settings.algorithms import ALGORITHMS, ROLLOUTS
from trl_multiagent.settings.read import ConfigError, fail
from trl_multiagent.team.adapters import check_adapter_names
from trl_multiagent.team.critics import model_names
from trl_multiagent.trainers.base.actor_critic_config import ActorCriticConfig


def check_team(recipe: Recipe, roles: Sequence[str]) -> None:
    """
    Builds the team on the meta device, if its models are in local folders or built by the task, so that errors of transformers and PEFT
    surface before any weights load.

    Raises:
        ConfigError: the team cannot be made; the message names the settings about models.
        ValueError: the number of models for critics is wrong.
    """
    args, loader = recipe.training_args, recipe.loader
    if isinstance(args, ActorCriticConfig):
        model_names(args.critic_models, args.critic_names([x for x in roles if x not in (args.frozen_agents or ())]))
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
            check_prompts(role, team.agents[role], [], [], args.max_completion_length)
        if loader.peft_config is not None:
            for model in team.policies.values():
                check_adapter_names(loader.peft_config, cast(PeftModel, model))
    except Exception as error:  # transformers and PEFT raise errors of many kinds
        if "meta tensor" in str(error):  # the adapters, such as DoRA's, are computed from the weights
            return
        source = "agent_model.name" if recipe.agents is None else "agents"
        others = [f"`{x}.{name}`" for x in ("agent_model", "peft") for name in recipe.values[x] if name != "name"]
        problem = str(error) if isinstance(error, ValueError) else describe(error)
        settings = ", ".join([f"`{source}: {loader.models}`", *others])
        raise ConfigError(f"the team cannot be built with {settings}: {problem}") from error


def check_run(recipe: Recipe, environment: Environment, train_dataset: Dataset) -> None:
    """
    Locks the folder of the run, and checks that all processes have the same settings and data, and that the checkpoint to continue from
    is complete and belongs to this run. No model is loaded for this. If a check fails, the program ends on all processes.
    """
    state, problems, checkpoint = PartialState(), [], recipe.resume_from_checkpoint
    try:
        if state.num_processes > 1:
            check_agreement(state, recipe.describe(environment, train_dataset, team=None))
        # The trainer of a run on preferences compares the checkpoint itself
        if checkpoint is not None and ALGORITHMS[recipe.algorithm].run == ROLLOUTS:
            recipe.check_checkpoint(checkpoint, environment, train_dataset)
        if state.is_main_process:
            advice = f"choose another RUN_ID or `{recipe.algorithm}.output_dir`"
            recipe.reservation.enter_context(locked(recipe.run_folder, advice))
    except (ValueError, OSError) as error:
        problems = [str(error)]
    problems = list(dict.fromkeys(gather_object(problems)))
    if problems:
        fail(recipe.prog, ConfigError(" ".join(problems)))

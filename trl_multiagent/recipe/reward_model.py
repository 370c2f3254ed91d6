"""The function behind `train_reward_model.py`: it trains a joint reward model on preferences that were collected before."""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_multiagent.jobs.stopping import end_on_signal
from trl_multiagent.quiet import hide_progress_bars
from trl_multiagent.recipe.plan import print_plan
from trl_multiagent.recipe.run import end_on_wrong_input, end_with_one_line
from trl_multiagent.recipe.tasks import make_environment
from trl_multiagent.settings.derive import Settings
from trl_multiagent.settings.read import ConfigError


if TYPE_CHECKING:
    from trl_multiagent.trainers.joint_reward_config import JointRewardConfig


SECTION = "reward_model"


def run_reward_model(settings: Settings, dry_run: bool, prog: str) -> None:
    """
    Trains a joint reward model, or prints the plan. Wrong settings end the program.

    Args:
        settings ([`~trl_multiagent.settings.derive.Settings`]): The settings.
        dry_run (`bool`): Whether to print the plan only.
        prog (`str`): Name of the program in messages.
    """
    with end_on_wrong_input(prog):
        name = settings.values[SECTION].get("preference_dataset")
        if name is None:
            raise ConfigError(
                f"`{SECTION}.preference_dataset` is missing: the preferences to learn from. `trl-multiagent collect` makes some."
            )
        if not isinstance(settings.model_names, str):
            raise ConfigError("A reward model starts from one model: set `agent_model.name` instead of `agents`.")
        if settings.sections["agent_model"].is_quantized:
            raise ConfigError(
                "`agent_model.load_in_4bit` and `load_in_8bit` are for teams: a reward model is not quantized."
            )
        args = make_args(settings)
        from trl_multiagent.preferences import load_preferences
        from trl_multiagent.recipe.checks import check_reports
        from trl_multiagent.recipe.folders import check_folder, check_push
        from trl_multiagent.recipe.models import check_models, make_peft_config
        from trl_multiagent.recipe.reward_phase import check_reward_args, summary, train_reward_model
        from trl_multiagent.team.load import build

        check_models("agent_model.name", [settings.model_names], settings.task)
        check_reward_args(SECTION, args, settings.model_names)
        check_reports(SECTION, args)
        given_folder = "output_dir" in settings.values[SECTION]
        check_folder(f"`{SECTION}.output_dir`" if given_folder else "`output.base_dir`", Path(args.output_dir))
        notes = list(settings.notes)
        if args.push_to_hub:
            missing = check_push(SECTION, args)
            if missing is not None and not dry_run:
                raise ConfigError(missing)
            notes += [missing] if missing else []
        if args.process_index == 0:
            for note in notes:
                print(f"{prog}: note: {note}", file=sys.stderr)
        peft_config = make_peft_config(settings)
        if peft_config is not None:
            peft_config.task_type = "SEQ_CLS"  # the head is trained, too
        environment = make_environment(settings, Path(args.output_dir))
        preferences = load_preferences(name, environment.roles)
        if dry_run:
            lines = {"starts from": settings.model_names, "preferences": f"{name}, {len(preferences)} pairs"}
            print_plan({**lines, "folder": args.output_dir})
            return
        logging.basicConfig(format="%(message)s")
        if args.disable_tqdm:
            hide_progress_bars()
        model = build(settings.model_names, settings.task.models)
        if model != settings.model_names:
            check_reward_args(SECTION, args, model)
        with end_on_signal(prog, list), end_with_one_line(prog):
            facts = train_reward_model(model, args, preferences, list(environment.roles), peft_config)
    if args.process_index == 0:
        print(f"Reward model in {args.output_dir}: {summary(facts)}", flush=True)


def make_args(settings: Settings) -> JointRewardConfig:
    """
    The arguments of the trainer.

    Raises:
        ConfigError: the configuration class refuses a value.
    """
    from trl_multiagent.recipe.models import loading_arguments
    from trl_multiagent.trainers.joint_reward_config import JointRewardConfig

    names = {field.name for field in dataclasses.fields(JointRewardConfig)}
    values: dict[str, Any] = {name: value for name, value in settings.arguments.items() if name in names}
    values.setdefault("output_dir", str(Path(settings.sections["output"].base_dir) / SECTION))
    values.setdefault("save_strategy", "epoch")
    values.setdefault("save_total_limit", 1)
    values.setdefault("report_to", "none")
    model = settings.sections["agent_model"]
    values["model_init_kwargs"] = loading_arguments(model)
    try:
        args = JointRewardConfig(**values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"section `{SECTION}`: {error}") from error
    if model.torch_dtype is not None and (model.use_peft or settings.has_peft_section):  # of the base of an adapter
        args.model_init_kwargs = {"dtype": model.torch_dtype, **values["model_init_kwargs"]}
    return args

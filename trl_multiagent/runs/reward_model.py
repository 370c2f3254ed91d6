"""Trains a joint reward model on collected preferences, alone (`train_reward_model.py`) or for MARLHF."""

import dataclasses
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from peft import PeftConfig
from transformers.trainer_utils import get_last_checkpoint

from trl_multiagent.folders import read_json
from trl_multiagent.jobs.fingerprint import digest_of_rows
from trl_multiagent.jobs.signals import end_on_signal
from trl_multiagent.jobs.stage import Stage
from trl_multiagent.preferences import load_preferences
from trl_multiagent.runs.models import loading_arguments, make_environment, make_peft_config
from trl_multiagent.runs.plan import print_plan
from trl_multiagent.runs.prepared import check_results, start_logging
from trl_multiagent.runs.run import end_on_wrong_input, end_with_one_line
from trl_multiagent.settings.derive import Settings, argument_errors
from trl_multiagent.settings.read import ConfigError
from trl_multiagent.team.load import build
from trl_multiagent.trainers.base.team_trainer import forget_engine
from trl_multiagent.trainers.joint_reward_config import JointRewardConfig
from trl_multiagent.trainers.joint_reward_trainer import REPORT_FILE, JointRewardTrainer


SECTION = "reward_model"
COMPLETE_FILE = "complete.json"  # written last
PROCESSES = "number of processes"  # name of the setting
# Metrics of an evaluation: the loss, TRL's metrics, and those of held-out pairs
EVAL_METRICS = "loss accuracy margin mean_reward min_reward max_reward".split()
FREE = ("output_dir", "logging_dir", "report_to", "disable_tqdm", "run_name", "hub_token", "save_total_limit")


def run_reward_model(settings: Settings) -> None:
    """Trains a joint reward model, or prints the plan. Wrong settings end the program."""
    prog = settings.prog
    with end_on_wrong_input(prog):
        args = make_args(settings)
        name, base = settings.arguments["preference_dataset"], str(settings.model_names)
        check_results(settings, args)
        environment = make_environment(settings, Path(args.output_dir))
        preferences = load_preferences(name, environment.roles)
        start_logging(settings, args.disable_tqdm, args.process_index == 0)
        if settings.dry_run:
            lines = {"starts from": base, "preferences": f"{name}, {len(preferences)} pairs"}
            return print_plan({**lines, "folder": args.output_dir})
        peft_config = make_peft_config(settings)
        model = build(base, settings.builders)
        with end_on_signal(prog, list), end_with_one_line(prog):
            facts = train_reward_model(model, args, preferences, list(environment.roles), peft_config)
    if args.process_index == 0:
        print(f"Reward model in {args.output_dir}: {summary(facts)}", flush=True)


def make_args(settings: Settings) -> JointRewardConfig:
    """Makes the arguments of the trainer. Raises `ConfigError` if a setting is missing or wrong."""
    model = settings.agent_model
    if settings.arguments.get("preference_dataset") is None:
        raise ConfigError(f"`{SECTION}.preference_dataset` is missing: `trl-multiagent collect` makes preferences.")
    if settings.agents is not None:
        raise ConfigError("A reward model starts from one model: set `agent_model.name` instead of `agents`.")
    if model.is_quantized:
        raise ConfigError("`agent_model.load_in_4bit` and `load_in_8bit` are for teams.")
    names = {field.name for field in dataclasses.fields(JointRewardConfig)}
    values: dict[str, Any] = {"output_dir": str(Path(settings.output.base_dir) / SECTION)}
    values |= {name: value for name, value in settings.arguments.items() if name in names}
    has_base = model.torch_dtype is not None and (model.use_peft or settings.has_peft_section)  # of an adapter
    values["model_init_kwargs"] = ({"dtype": model.torch_dtype} if has_base else {}) | loading_arguments(model)
    return checked_args(SECTION, settings.values[SECTION], values)


def checked_args(section: str, given: dict[str, Any], values: dict[str, Any]) -> JointRewardConfig:
    """
    Makes the arguments of the trainer from `values`. Raises `ConfigError` if one is wrong. `given`: those of the user.
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
    model: str, args: JointRewardConfig, preferences: Dataset, roles: list[str], peft_config: PeftConfig | None = None
) -> dict[str, Any]:
    """
    Trains a joint reward model and saves it in `args.output_dir`, with its report and card. An interrupted training is
    resumed from its last checkpoint; a complete model is kept. Returns the numbers about held-out pairs, see
    [`JointRewardTrainer.report`]; empty if no pairs are held out. Raises `ValueError` if the folder holds other work
    or is locked, or the checkpoint does not fit.
    """
    folder = Path(args.output_dir)
    is_complete = (folder / COMPLETE_FILE).is_file()
    checkpoint = get_last_checkpoint(str(folder)) if folder.is_dir() and not is_complete else None
    free = [PROCESSES] if checkpoint is None else []  # only a checkpoint depends on the number of processes
    settings = describe(model, args, preferences, roles, peft_config)
    stage = Stage(folder, "reward model", settings, PartialState(), free)
    if is_complete:
        stage.check()
        return read_json(folder / COMPLETE_FILE)["report"]
    with stage.open():
        forget_engine()
        trainer = JointRewardTrainer(model, args, preferences, roles=roles, peft_config=peft_config)
        trainer.train(resume_from_checkpoint=checkpoint)
        facts = {} if trainer.eval_dataset is None else trainer.report()
        trainer.save_model()
        trainer.create_model_card()
        trainer.accelerator.wait_for_everyone()  # until all files are written
        stage.save_result(COMPLETE_FILE, {"report": facts})
    return facts


def describe(
    model: str, args: JointRewardConfig, preferences: Dataset, roles: list[str], peft_config: PeftConfig | None
) -> dict[str, Any]:
    """Returns the settings that must be the same when a training is resumed."""
    return {
        "model": model,
        "roles": roles,
        "rows of the preferences": digest_of_rows(preferences),
        PROCESSES: args.world_size,
        "adapter": peft_config and str(sorted(peft_config.to_dict().items(), key=str)),
        **{name: value for name, value in args.to_dict().items() if name not in FREE},
    }


def summary(facts: dict[str, Any]) -> str:
    """Returns the numbers about held-out pairs on one line."""
    if not facts:
        return "no pairs were held out to measure it"
    return (
        f"{facts['accuracy']:.0%} of {facts['pairs']} held-out pairs in the right order, margin "
        f"{facts['margin']:.2f} ({REPORT_FILE})"
    )

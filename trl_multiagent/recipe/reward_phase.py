"""Trains a joint reward model in a folder, or continues, or uses the one that is there."""

import shutil
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from peft import PeftConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import get_last_checkpoint
from trl.trainer.reward_trainer import suppress_seqcls_warning
from trl.trainer.utils import create_model_from_path

from trl_multiagent.environments.task_errors import describe as describe_error
from trl_multiagent.jobs.identity import checksum_of_file, digest_of_rows
from trl_multiagent.jobs.stage import Stage
from trl_multiagent.models.pretrained import quiet_loading
from trl_multiagent.settings.read import ConfigError
from trl_multiagent.trainers.base.checkpoint_files import verify_checkpoint
from trl_multiagent.trainers.base.distribution import forget_engine
from trl_multiagent.trainers.joint_reward_config import JointRewardConfig
from trl_multiagent.trainers.joint_reward_trainer import REPORT_FILE, JointRewardTrainer


COMPLETE_FILE = "complete.json"  # written last
PROCESSES = "number of processes"  # name of the setting
# Of an evaluation: the loss, TRL's metrics, and those of held-out pairs
EVAL_METRICS: tuple[str, ...] = ("loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward")
EVAL_METRICS += ("calibration_error", "accuracy_small_gaps", "accuracy_large_gaps")
FREE = ("output_dir", "logging_dir", "report_to", "disable_tqdm", "run_name", "hub_token", "save_total_limit")


def check_reward_args(section: str, args: JointRewardConfig, base: str) -> None:
    """
    Checks, without loading weights, what the trainer would refuse only after it has loaded the model. Of a model that is no local folder,
    nothing is loaded, so it is not checked.

    Args:
        section (`str`): The section of the arguments, for messages.
        args ([`JointRewardConfig`]): Arguments of the trainer.
        base (`str`): Model id or folder to start from.

    Raises:
        ConfigError: an argument is impossible, or the model cannot be loaded.
    """
    metric = (args.metric_for_best_model or "loss").removeprefix("eval_")
    if metric not in EVAL_METRICS:
        raise ConfigError(
            f"`{section}.metric_for_best_model` is {metric!r}, which is no metric of an evaluation; choose one of {', '.join(EVAL_METRICS)}."
        )
    if args.eval_strategy != "no" and args.eval_fraction == 0:
        raise ConfigError(f"`{section}.eval_strategy` needs pairs that are held out: set `{section}.eval_fraction`.")
    if not Path(base).is_dir():
        return
    kwargs = dict(args.model_init_kwargs or {})
    trust = {"trust_remote_code": args.trust_remote_code}
    if not is_deepspeed_zero3_enabled():
        try:
            with quiet_loading(), suppress_seqcls_warning():
                create_model_from_path(
                    base,
                    AutoModelForSequenceClassification,
                    **{**trust, **kwargs, "num_labels": 1, "device_map": "meta"},
                )
        except Exception as error:  # transformers raises errors of many kinds
            if "meta tensor" not in str(error):  # weights, such as those of an adapter, are computed when it is loaded
                given = f" with the `model_init_kwargs` {kwargs}" if kwargs else ""
                raise ConfigError(
                    f"the reward model cannot be loaded from {base!r}{given}: {describe_error(error)}"
                ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(base, **trust)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"the tokenizer of the reward model cannot be loaded from {base!r}: {describe_error(error)}"
        ) from error
    for name in ("eos_token", "pad_token"):
        token = getattr(args, name)
        if token is not None and token not in tokenizer.get_vocab():
            raise ConfigError(f"`{section}.{name}` is {token!r}, which is no token of the tokenizer in {base}.")


def train_reward_model(
    model: str, args: JointRewardConfig, preferences: Dataset, roles: list[str], peft_config: PeftConfig | None = None
) -> dict[str, Any]:
    """
    Trains a joint reward model and saves it in `args.output_dir`, with its report and card.

    A training that was interrupted is continued from its last checkpoint. A model that is complete is kept.

    Args:
        model (`str`): Model id or folder to start from.
        args ([`JointRewardConfig`]): Arguments of the trainer.
        preferences ([`~datasets.Dataset`]): Joint preferences.
        roles (`list[str]`): The roles, in the order in which the model reads them.
        peft_config ([`~peft.PeftConfig`], *optional*): Adapter to train.

    Returns:
        `dict`: The numbers about held-out pairs, see [`JointRewardTrainer.report`]; empty if none are held out.

    Raises:
        StageChanged: the folder holds a reward model of other settings or preferences, a checkpoint of another number of processes, or
            other files.
        ValueError: another program is writing to the folder, the processes have different settings or preferences, or the checkpoint to
            continue from, or the complete model, is damaged.
    """
    folder, state = Path(args.output_dir), PartialState()
    is_complete = (folder / COMPLETE_FILE).is_file()
    checkpoint = get_last_checkpoint(str(folder)) if folder.is_dir() and not is_complete else None
    free = [PROCESSES] if checkpoint is None else []  # only a checkpoint depends on it
    stage = Stage(folder, "reward model", describe(model, args, preferences, roles, peft_config), state, free)
    if is_complete:
        stage.check()
        saved, checksums = stage.result(COMPLETE_FILE), checksums_of_model(folder)
        damaged = [name for name, checksum in saved["checksums"].items() if checksums.get(name) != checksum]
        if damaged:
            raise ValueError(
                f"The reward model in {folder} is damaged: {', '.join(damaged)}. Remove this folder to train it again."
            )
        return saved["report"]
    with stage.open():
        forget_engine()
        if checkpoint is not None:
            verify_checkpoint(checkpoint)  # before the model is loaded
        trainer = JointRewardTrainer(model, args, preferences, roles=roles, peft_config=peft_config)
        trainer.train(resume_from_checkpoint=checkpoint)
        facts = {} if trainer.eval_dataset is None else trainer.report()
        trainer.save_model()
        trainer.create_model_card()
        trainer.accelerator.wait_for_everyone()  # until the files are there
        stage.save_result(COMPLETE_FILE, {"report": facts, "checksums": checksums_of_model(folder)})
        if state.is_main_process:
            for path in folder.glob("checkpoint-*"):
                shutil.rmtree(path)
        trainer.accelerator.wait_for_everyone()
    return facts


def checksums_of_model(folder: Path) -> dict[str, str]:
    """Computes the checksums of the weights, the configuration and the tokenizer in a folder, by the names of the files."""
    paths = [path for pattern in ("*.safetensors", "*config.json", "tokenizer*") for path in folder.glob(pattern)]
    return {path.name: checksum_of_file(path) for path in paths}


def describe(
    model: str, args: JointRewardConfig, preferences: Dataset, roles: list[str], peft_config: PeftConfig | None
) -> dict[str, Any]:
    """Returns what must be the same when a training is continued."""
    settings: dict[str, Any] = {"model": model, "roles": roles, "rows of the preferences": digest_of_rows(preferences)}
    settings[PROCESSES] = args.world_size
    settings["adapter"] = None if peft_config is None else str(sorted(peft_config.to_dict().items(), key=str))
    return settings | {name: value for name, value in args.to_dict().items() if name not in FREE}


def summary(facts: dict[str, Any]) -> str:
    """The numbers about held-out pairs, on one line."""
    if not facts:
        return "no pairs were held out to measure it"
    return (
        f"{facts['accuracy']:.0%} of {facts['pairs']} held-out pairs in the right order, margin {facts['margin']:.2f}, "
        f"calibration error {facts['calibration_error']:.2f} ({REPORT_FILE})"
    )

"""Resumes runs exactly, and rejects a checkpoint of another run."""

import contextlib
import json
import os
import random
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.integrations import TensorBoardCallback, is_deepspeed_zero3_enabled
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, TrainOutput, get_last_checkpoint
from transformers.utils import logging

from trl_multiagent.environments.task_errors import UnavailableError, describe
from trl_multiagent.folders import CRITICS_FOLDER, TEAM_FILE, is_disk_full
from trl_multiagent.jobs.distributed import check_agreement, fail_together
from trl_multiagent.jobs.fingerprint import Changes, checksum_of_weights, differences
from trl_multiagent.team.files import AGENTS_FOLDER
from trl_multiagent.trainers.base.checkpoint_files import (
    PROCESS_FILE,
    REFERENCE_FILE,
    refusing_together,
    remove_unfinished,
    verify_checkpoint,
)
from trl_multiagent.trainers.base.common_trainer import CommonTrainerMixin
from trl_multiagent.trainers.base.failed_saves import (
    SaveError,
    WriteError,
    fallback_folder,
    save_in_fallback_folder,
    write_problem,
)
from trl_multiagent.trainers.base.run_settings import (
    OPTIMIZER_SETTINGS,
    check_changes,
    check_steps,
    describe_run,
    describe_schedule,
    format_changes,
)


logger = logging.get_logger(__name__)

CHANGES_FILE = "resume_changes.json"  # in the output folder


class CheckpointMixin(CommonTrainerMixin):
    """
    Makes a TRL trainer resume exactly. Part of [`TeamTrainerMixin`].

    In addition, a checkpoint holds the reference policy if it is updated during the training, and the settings of the
    run.
    """

    ref_model: Any = None  # the reference policy, if it is a separate model
    _changes: list[dict[str, Any]] = []  # settings that changed when the run was resumed, now and earlier
    # Whether a run may resume from a checkpoint of the last step. It then takes no step, and only repeats the end of
    # the training
    may_be_complete = False

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """
        Trains the team, as `Trainer.train` does.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                Folder of the checkpoint to continue from, or `True` for the last one in `args.output_dir`.
            trial, ignore_keys_for_eval: See `Trainer.train`.

        Raises:
            ValueError: The checkpoint is incomplete or damaged, belongs to another run, or has taken all steps; or the
            processes have
                different settings, data or models.
            WriteError: A file could not be written, because the disk is full.
        """
        is_last = resume_from_checkpoint is True
        folder = get_last_checkpoint(self.args.output_dir) if is_last else resume_from_checkpoint
        if is_last and folder is None:
            raise ValueError(f"There is no checkpoint in {self.args.output_dir} to resume from.")
        with fail_together(self.accelerator):
            frozen = self._checksum_of_frozen_weights()
            self._settings = {**self._run_settings(), "weights that are not trained": frozen}
            schedule = describe_schedule(self.args, self.eval_dataset)
        check_agreement(self.accelerator, {**self._settings, **schedule})
        self._resumed = Path(str(folder)) if folder else None
        if self._resumed is not None:
            saved = self._check_checkpoint(self._resumed)
            self._continue_tracking(saved)
        if self.args.should_save:
            remove_unfinished(self.args.output_dir)
        try:
            start = None if self._resumed is None else str(self._resumed)
            return super().train(start, trial=trial, ignore_keys_for_eval=ignore_keys_for_eval)
        except UnavailableError as error:
            checkpoint = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            # Other processes do not handle this error, so they could not take part in saving
            can_save = self.accelerator.num_processes == 1 and self.args.save_strategy != SaveStrategy.NO
            if not can_save or self.state.global_step == 0 or checkpoint.is_dir():
                raise
            self._save_checkpoint(self.model, trial)
            raise UnavailableError(f"{error} The checkpoint of this step is {checkpoint}.") from error
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise WriteError(f"The training ended with {describe(error)}. {self._last_complete()}") from error

    def _last_complete(self) -> str:
        """Returns a sentence naming the last complete checkpoint."""
        folder = Path(self.args.output_dir)
        last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        return "There is no checkpoint." if last is None else f"The last complete checkpoint is {last}."

    # Saving

    def _checkpoint_state(self) -> dict[str, Any]:
        return {"settings": self._settings, "changes": self._changes, "tracking": self._tracking()}

    @contextlib.contextmanager
    def _handling_failure(self, unfinished: Path) -> Iterator[None]:
        """Saves at least the team if the block fails to write a checkpoint, and ends the run with a [`WriteError`]."""
        try:
            yield
        except SaveError:
            raise  # the message already names the folder of the team
        except Exception as error:
            if not self.args.should_save:
                raise
            problem = (
                f"The checkpoint of step {self.state.global_step} could not be written in {unfinished} "
                f"({write_problem(unfinished, error)}). {self._last_complete()}"
            )
            if (unfinished / TEAM_FILE).is_file():  # the team itself was written: moving it needs no more disk space
                folder = fallback_folder(unfinished.parent.parent)
                folder.mkdir()
                for name in (AGENTS_FOLDER, CRITICS_FOLDER, TEAM_FILE):
                    if (unfinished / name).exists():
                        os.replace(unfinished / name, folder / name)
                raise WriteError(f"{problem} The team is in {folder.absolute()}.") from error
            if is_deepspeed_zero3_enabled():  # each process has only a part of the weights
                raise
            result = save_in_fallback_folder(self.team, self.args.output_dir)
            raise WriteError(f"{problem} {result}") from error

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.ref_model is not None and self.args.sync_ref_model:
            weights = self.accelerator.get_state_dict(self.ref_model)
            if self.args.should_save:
                torch.save(weights, Path(output_dir) / REFERENCE_FILE)

    # Resuming

    def _run_settings(self) -> dict[str, Any]:
        """
        Returns the settings that must be the same in the run and in a checkpoint that it resumes from, as plain
        values.
        """
        return describe_run(self._name, self.team.roles, self.team, self.train_dataset, self.args)

    def _checksum_of_frozen_weights(self) -> str | None:
        """
        Computes a checksum of the weights that are neither trained nor saved. `None` under ZeRO-3, which divides them.
        """
        if is_deepspeed_zero3_enabled():
            return None
        frozen = []
        if self.team.has_adapters:
            frozen += [parameter for parameter in self.team.models.parameters() if not parameter.requires_grad]
        if self.team.critics is not None:
            frozen += [parameter for parameter in self.team.critics.parameters() if not parameter.requires_grad]
        if self.ref_model is not None and not self.args.sync_ref_model:
            frozen += self.ref_model.parameters()
        return checksum_of_weights(frozen)

    def _check_checkpoint(self, folder: Path) -> dict[str, Any]:
        """
        Verifies that this run can resume from a checkpoint, and records allowed changes of settings. Returns the state
        of the checkpoint, see [`~checkpoint_files.read_checkpoint`].

        Raises:
            ValueError: On all processes, if on any of them the checkpoint is damaged, belongs to another run, or has
            taken all steps.
        """
        saved = verify_checkpoint(folder)
        changes = differences(saved["settings"], self._settings)
        with refusing_together():
            check_changes(str(folder), changes, self.args)
            if not self.may_be_complete:
                check_steps(str(folder), saved["global_step"], len(self.train_dataset), self.args)
            process_file = PROCESS_FILE.format(self.args.process_index)
            if not (folder / process_file).is_file():
                raise ValueError(
                    f"{folder} has no {process_file}, the part of process {self.args.process_index}. If the nodes "
                    "have no common output folder, save with `save_on_each_node=True`."
                )
        if self.is_world_process_zero():
            warn_about_differences(folder, saved, changes)
        self._record_changes(folder, saved, changes)
        return saved

    def _record_changes(self, folder: Path, saved: dict[str, Any], changes: Changes) -> None:
        """Adds changed settings to the record that is saved in later checkpoints and in the output folder."""
        self._changes = list(saved.get("changes", []))
        self._changed_optimizer_settings = any(name in OPTIMIZER_SETTINGS for name in changes)
        if changes:
            as_dicts = {name: {"before": old, "after": new} for name, (old, new) in changes.items()}
            self._changes.append({"checkpoint": str(folder), "step": saved["global_step"], "changes": as_dicts})
        if self._changes and self.args.should_save:
            path = Path(self.args.output_dir, CHANGES_FILE)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._changes, indent=2) + "\n")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        run_settings: list[dict[str, Any]] = []
        if checkpoint is not None and self._changed_optimizer_settings:  # never under DeepSpeed
            groups = self.optimizer.param_groups
            run_settings = [{name: x for name, x in group.items() if name != "params"} for group in groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        if run_settings:
            self._apply_optimizer_settings(run_settings)
        if checkpoint is not None and self.ref_model is not None and self.args.sync_ref_model:
            weights = torch.load(Path(checkpoint) / REFERENCE_FILE, map_location="cpu", weights_only=True)
            reference = self.accelerator.unwrap_model(self.ref_model)
            if not is_deepspeed_zero3_enabled():
                reference.load_state_dict(weights)
                return
            import deepspeed  # optional, and slow to import

            with deepspeed.zero.GatheredParameters(list(reference.parameters()), modifier_rank=0):
                if self.is_world_process_zero():
                    reference.load_state_dict(weights)

    def _apply_optimizer_settings(self, run_settings: list[dict[str, Any]]) -> None:
        """Sets the optimizer's settings to those of this run. The learning rate keeps its position in the schedule."""
        for group, settings in zip(self.optimizer.param_groups, run_settings, strict=True):
            scheduled_fraction = group["lr"] / group["initial_lr"] if group["initial_lr"] else 1.0
            group.update(settings)
            group["lr"] = settings["initial_lr"] * scheduled_fraction
        self.lr_scheduler.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]
        self.lr_scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        try:
            return super()._finalize_training(trial, num_train_samples, start_time)
        except Exception as error:
            # Under ZeRO-3, each process has only a part of the weights
            if not self.args.should_save or is_deepspeed_zero3_enabled():
                raise
            result = save_in_fallback_folder(self.team, self.args.output_dir)
            error_class = WriteError if is_disk_full(error) else SaveError
            raise error_class(f"The training ended with {describe(error)}. {result}") from error

    # Trackers: a resumed run continues the records of the interrupted one

    def _tracking(self) -> dict[str, str | None]:
        """Returns the id of the Weights & Biases run and the folder of TensorBoard, or `None` if they are not used."""
        run_id = folder = None
        if "wandb" in self.args.report_to:
            import wandb

            run_id = None if wandb.run is None else wandb.run.id
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback):
                folder = callback.logging_dir
        return {"wandb_run_id": run_id, "tensorboard_folder": folder}

    def _continue_tracking(self, saved: dict[str, Any]) -> None:
        """Makes the trackers continue the records that a checkpoint names."""
        run_id, folder = saved["tracking"]["wandb_run_id"], saved["tracking"]["tensorboard_folder"]
        if run_id is not None and "wandb" in self.args.report_to:
            os.environ.setdefault("WANDB_RUN_ID", run_id)
            os.environ.setdefault("WANDB_RESUME", "allow")
        for callback in self.callback_handler.callbacks:
            if not isinstance(callback, TensorBoardCallback) or callback.logging_dir is not None:
                continue  # another tracker, or TENSORBOARD_LOGGING_DIR sets the folder
            if folder is not None and Path(folder).is_dir():
                callback.logging_dir = folder
                if self.is_world_process_zero():  # it logs the entries after the checkpoint again
                    callback.tb_writer = callback._SummaryWriter(log_dir=folder, purge_step=saved["global_step"] + 1)


def warn_about_differences(folder: Path, saved: dict[str, Any], changes: Changes) -> None:
    """Warns about settings and libraries that have changed since a checkpoint was saved."""
    if changes:
        logger.warning(f"The run continues {folder} with changed settings: {format_changes(changes)}.")
    if "checksums" not in saved:
        logger.warning(f"{folder} was saved by an earlier release, without checksums: damage cannot be detected.")
    for name, saved_version in saved["versions"].items():
        if saved_version != version(name):
            logger.warning(
                f"{folder} was saved with {name} {saved_version}, but {version(name)} is installed: results may "
                "differ."
            )


@contextlib.contextmanager
def replayable() -> Iterator[None]:
    """
    Restores the global random generators if the block raises `UnavailableError`, so that a resumed run can repeat the
    step.
    """
    python, arrays, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    except UnavailableError:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        raise

"""Writes the checkpoints of a trainer atomically, with the checksums of their files."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, TrainOutput

from trl_multiagent.jobs.processes import is_asked_to_stop
from trl_multiagent.jobs.stopping import Stopped, ending_later
from trl_multiagent.trainers.base.checkpoint_files import (
    UNFINISHED_FOLDER,
    checksums_of_node,
    flush_tree,
    publish,
    remove_unfinished,
    rotate,
    write_state,
)
from trl_multiagent.trainers.base.team_config import temporarily_set


if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object  # the trainer itself follows in the bases of the class that mixes this in


class AtomicSaveMixin(Base):
    """
    Makes a trainer write its checkpoints so that a crash at any time leaves the previous one intact, and damage is noticed.

    A checkpoint is written to a folder for unfinished checkpoints, and moved to its final place once every process has
    written its part. Its last file lists all others with their checksums, see [`~checkpoint_files.verify_checkpoint`].
    """

    _may_stop = True  # whether a checkpoint of the current step can be saved now
    _saving = False  # whether a checkpoint is being written, to the folder for unfinished ones

    def _checkpoint_state(self) -> dict[str, Any]:
        """Returns further entries of a checkpoint's state, as plain values."""
        return {}

    def _handling_failure(self, unfinished: Path) -> AbstractContextManager[None]:
        """Handles errors of writing a checkpoint, which happens in the block."""
        return nullcontext()

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED_FOLDER) if self._saving else folder

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        run_folder = Path(self._get_output_dir(trial))
        finished = run_folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        unfinished = run_folder / UNFINISHED_FOLDER / finished.name
        with self._handling_failure(unfinished):
            self._write_checkpoint(model, trial, unfinished, finished)
        if self.args.should_save:
            rotate(run_folder, self.args.save_total_limit, [finished, self.state.best_model_checkpoint])
            remove_unfinished(run_folder)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(finished))

    def _write_checkpoint(self, model: torch.nn.Module, trial: Any, unfinished: Path, finished: Path) -> None:
        if self.args.should_save:
            remove_unfinished(finished.parent)
        self.accelerator.wait_for_everyone()  # no process may write before the folder is removed
        with temporarily_set(self, _saving=True):
            super()._save_checkpoint(model, trial)
        if self.state.best_global_step:
            best = finished.with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            if best == finished or best.is_dir():
                self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            # again, with the final path of the best checkpoint
            self.state.save_to_json(unfinished / TRAINER_STATE_NAME)
        self.accelerator.wait_for_everyone()  # every process has written its part
        if self.is_local_process_zero():
            flush_tree(unfinished)
        self.accelerator.wait_for_everyone()
        checksums = checksums_of_node(unfinished)
        if self.args.should_save:
            write_state(
                unfinished,
                checksums,
                global_step=self.state.global_step,
                weights_only=self.args.save_only_model,
                **self._checkpoint_state(),
            )
            publish(unfinished, finished)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._saving:  # an unfinished checkpoint is pushed later, when it is complete
            super()._push_from_checkpoint(checkpoint_folder)

    # Ending early

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        with ending_later():
            return super().train(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Ends the training after the step if a signal has asked for it. The last step ends it anyway."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.control.should_training_stop or not self._may_stop or not is_asked_to_stop(self.accelerator):
            return
        step = f"after step {self.state.global_step} of {self.state.max_steps}"
        if self.args.save_strategy == SaveStrategy.NO:
            raise Stopped(f"{step}, without a checkpoint, because `save_strategy` is 'no'")
        folder = Path(self._get_output_dir(None)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if not folder.is_dir():
            self._save_checkpoint(self.model, None)
        raise Stopped(f"{step}, which is saved", str(folder))

"""The changes of `Trainer` that all trainers of this package share."""

import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, SaveStrategy, TrainOutput
from transformers.utils import logging

from trl_multiagent.jobs.distributed import is_asked_to_stop
from trl_multiagent.jobs.signals import Stopped, ending_later
from trl_multiagent.trainers.base.checkpoint_files import (
    PROCESS_FILE,
    UNFINISHED_FOLDER,
    checksums_of_node,
    flush_tree,
    publish,
    remove_unfinished,
    rotate,
    write_state,
)
from trl_multiagent.trainers.base.common_config import check_trained_weights
from trl_multiagent.trainers.base.team_config import temporarily_set


logger = logging.get_logger(__name__)


class CommonTrainerMixin(Trainer):
    """
    Makes a trainer of TRL evaluate, predict and train in any order, write its checkpoints atomically, resume exactly,
    and end after a step when it gets a signal.

    If accelerate has prepared a model for an evaluation, it does not wrap the model for a training. Without the
    wrapper, processes do not share gradients, and each trains its own model. So evaluations here do not prepare the
    model.

    A checkpoint is written to a folder for unfinished checkpoints, and moved to its final place once every process has
    written its part. So a crash at any time leaves the previous checkpoint intact. The last file of a checkpoint lists
    all others with their checksums, see [`~checkpoint_files.verify_checkpoint`].
    """

    deepspeed: Any  # the engine; `None` before a training
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    _tr_loss: Any  # sum of the losses since the last log
    _was_given_optimizer: bool | None = None  # `None` before a training
    _metrics: dict[str, Any]  # of TRL's trainers: by mode, the values of each metric since the last log
    _total_loss_scalar: float
    _globalstep_last_logged: int
    _resumed: Path | None = None  # the checkpoint from which this run resumes
    _may_stop = True  # whether a checkpoint of the current step can be saved now
    _saving = False  # whether a checkpoint is being written, to the folder for unfinished ones

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Without a seed, each process takes one from its random numbers, which differ between processes after a
        # training
        config = self.accelerator.dataloader_config
        if config.data_seed is None:
            config.data_seed = self.args.seed

    # Training and evaluating in any order

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        is_given = self._was_given_optimizer is None and self.optimizer is not None
        if is_given and self.args.rounds_stochastically:
            raise ValueError("`bf16_stochastic_round` has no effect on the optimizer in `optimizers`: leave it out.")
        with ending_later():
            return super().train(*args, **kwargs)

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_trained_weights(self.model.named_parameters(), self.args)  # a callback may have changed them
        return super().training_step(model, *args, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, DataLoader]:
        if self.is_deepspeed_enabled and self.deepspeed is not None:
            self._reset_engine(resume_from_checkpoint)
        elif self._was_given_optimizer is None:
            self._was_given_optimizer = self.optimizer is not None or self.lr_scheduler is not None
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.accelerator.num_processes > 1 and self.model_wrapped is self.model:
            raise RuntimeError(
                "accelerate has not wrapped the model for several processes, so each of them would train its own "
                "model. Was the "
                "model given to `Accelerator.prepare` or `prepare_model` before the training?"
            )
        return prepared

    def _reset_engine(self, resume_from_checkpoint: str | None) -> None:
        """Resets the state of DeepSpeed, so that a second training can create a new engine."""
        if self._was_given_optimizer:
            raise ValueError(
                "Under DeepSpeed, an optimizer or a scheduler that was given to the trainer can be used for one "
                "training only. Create another "
                "trainer for the next one, or leave `optimizers` out."
            )
        if resume_from_checkpoint is None and self.is_world_process_zero():
            logger.warning(
                "This trainer trains again. Under DeepSpeed the state of its optimizer, such as Adam's moments, "
                "is reset; without "
                "DeepSpeed it would be kept."
            )
        self.deepspeed, self.model_wrapped, self.optimizer, self.lr_scheduler = None, self.model, None, None

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        # The loss of the steps since the last log, averaged over processes as a log does
        self._tr_loss = self.accelerator.reduce(self._tr_loss, "mean")
        best = self.state.best_model_checkpoint
        if self.args.should_save and self.args.save_total_limit == 1 and best is not None:
            rotate(Path(self._get_output_dir(trial)), 1, [best])  # `Trainer` would not remove checkpoints atomically
        self._initial_global_step = 0  # the mean loss and the speed cover the whole run
        return super()._finalize_training(trial, num_train_samples, self._start_time)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        # Before a training there is no engine. transformers makes one for an evaluation only under ZeRO-3
        had_engine = self.deepspeed is not None
        needs_engine = had_engine or is_deepspeed_zero3_enabled()
        try:
            with (
                temporarily_set(self, is_deepspeed_enabled=self.is_deepspeed_enabled and needs_engine),
                temporarily_set(self.accelerator, prepare_model=lambda model, **_: model),
                self.accelerator.autocast(),  # which the preparation would have added
            ):
                return super().evaluation_loop(*args, **kwargs)
        finally:
            if self.deepspeed is not None and not had_engine:  # it has no optimizer; the training makes its own
                self.accelerator.free_memory()
                self.deepspeed, self.model_wrapped = None, self.model

    # Checkpoints

    def _checkpoint_state(self) -> dict[str, Any]:
        """Returns further entries of a checkpoint's state, as plain values."""
        return {}

    def _handling_failure(self, unfinished: Path) -> AbstractContextManager[None]:
        """Handles errors of writing a checkpoint within the block."""
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
            facts = {"global_step": self.state.global_step, "weights_only": self.args.save_only_model}
            write_state(unfinished, checksums, **facts, **self._checkpoint_state())
            publish(unfinished, finished)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._saving:  # an unfinished checkpoint is pushed later, when it is complete
            super()._push_from_checkpoint(checkpoint_folder)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Ends the training after the step if the program got a signal. The last step ends it anyway."""
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

    # Exact resuming: the metrics of a process that are not yet logged are part of a checkpoint

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        process = self.args.process_index
        (Path(output_dir) / PROCESS_FILE.format(process)).write_text(json.dumps(self._process_state()) + "\n")

    def _process_state(self) -> dict[str, Any]:
        """Returns the metrics of this process that are not yet logged, as plain values."""
        return {
            "metrics": self._metrics,
            "loss": self._tr_loss.item(),
            "logged_loss": self._total_loss_scalar,
            "last_logged_step": self._globalstep_last_logged,
            "seconds": time.time() - self._start_time,
        }

    def _init_training_state(self, max_steps: int, epoch_steps: int, num_epochs: int, *args: Any) -> tuple[int, int]:
        position = super()._init_training_state(max_steps, epoch_steps, num_epochs, *args)
        # `Trainer` would train in the rest of an epoch in which the last step was taken
        return (num_epochs, 0) if self.state.global_step >= max_steps else position

    def _begin_training(self) -> None:
        """Restores the state of this process. Called after the trainer has reset its counters."""
        self._start_time = time.time()
        # The intervals of saving, logging and evaluating are those of this run, not of the checkpoint
        self.state.compute_steps(self.args, self.state.max_steps)
        if self._resumed is not None:
            process = self.args.process_index
            self._load_process_state(json.loads((self._resumed / PROCESS_FILE.format(process)).read_text()))

    def _is_between_batches(self) -> bool:
        """Returns whether the next optimizer step begins with a new batch."""
        return True

    def _load_process_state(self, state: dict[str, Any]) -> None:
        for mode, metrics in state["metrics"].items():
            self._metrics[mode].clear()
            self._metrics[mode].update(metrics)
        self._tr_loss.fill_(state["loss"])
        self._total_loss_scalar = state["logged_loss"]
        self._globalstep_last_logged = state["last_logged_step"]
        self._start_time -= state["seconds"]

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        if skip_scheduler and self._resumed is not None:  # `eval_on_start` does not apply to a resumed run
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)


class CheckpointCallback(TrainerCallback):
    """
    Restores the state of a resumed run, and postpones some saves.

    A save at the last step of an epoch is postponed to the end of the epoch, after the epoch's evaluation and log. So
    a run that resumes there begins with the next epoch. If a batch is used for several optimizer steps, a save is
    postponed to the last of them, because a checkpoint has no batch. A run that ends because of a signal waits for the
    same moment.
    """

    def __init__(self, trainer: CommonTrainerMixin):
        self.trainer = trainer
        self.save_is_due = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.trainer._begin_training()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        ends_epoch = state.epoch == int(state.epoch) or control.should_training_stop
        self.trainer._may_stop = not ends_epoch and self.trainer._is_between_batches()
        if control.should_save or self.save_is_due:
            self.save_is_due = not self.trainer._may_stop
            control.should_save = not self.save_is_due

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        control.should_save |= self.save_is_due
        self.save_is_due, self.trainer._may_stop = False, True

"""Makes accelerate wrap the trained model exactly once, for the training, even if the trainer has evaluated before."""

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from transformers.utils import logging

from trl_multiagent.trainers.base.team_config import temporarily_set


logger = logging.get_logger(__name__)

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object  # the trainer itself follows in the bases of the class that mixes this in


class WrappingMixin(Base):
    """
    Makes a trainer evaluate, predict and train in any order, in one process or several.

    What accelerate has prepared for an evaluation, it does not wrap for a training. Without the wrapper, processes do not share
    gradients, and each trains a model of its own.
    """

    deepspeed: Any  # the engine; `None` before a training
    model_wrapped: Any
    _tr_loss: Any  # of the steps since the last log
    _was_given_optimizer: bool | None = None  # `None` before a training

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Without a seed, each process takes that of its own random numbers, which differ between processes after a training
        config = self.accelerator.dataloader_config
        if config.data_seed is None:
            config.data_seed = self.args.seed

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, DataLoader]:
        if self.is_deepspeed_enabled and self.deepspeed is not None:
            self._leave_engine(resume_from_checkpoint)
        elif self._was_given_optimizer is None:
            self._was_given_optimizer = self.optimizer is not None or self.lr_scheduler is not None
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.accelerator.num_processes > 1 and self.model_wrapped is self.model:
            raise RuntimeError(
                "accelerate has not wrapped the model for several processes, so each of them would train a model of its own. Was the "
                "model given to `Accelerator.prepare` or `prepare_model` before the training?"
            )
        return prepared

    def _leave_engine(self, resume_from_checkpoint: str | None) -> None:
        """Makes room for the engine of another training. `Trainer` has destroyed that of the last one, with its optimizer."""
        if self._was_given_optimizer:
            raise ValueError(
                "Under DeepSpeed, an optimizer or a scheduler that was given to the trainer can be used for one training only. Create another "
                "trainer for the next one, or leave `optimizers` out."
            )
        if resume_from_checkpoint is None and self.is_world_process_zero():
            logger.warning(
                "This trainer trains again. Under DeepSpeed the state of its optimizer, such as Adam's moments, starts anew; without "
                "DeepSpeed it would be kept."
            )
        self.deepspeed, self.model_wrapped, self.optimizer, self.lr_scheduler = None, self.model, None, None

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self._tr_loss = self.accelerator.reduce(
            self._tr_loss, "mean"
        )  # of the steps that were not logged, as in a log
        return super()._finalize_training(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        # Before a training there is no engine, and transformers makes one for an evaluation under ZeRO-3 alone
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

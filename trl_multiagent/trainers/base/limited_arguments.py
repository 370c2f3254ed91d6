"""What every trainer of this package expects of the arguments in `TrainingArguments`."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import Trainer, get_scheduler
from transformers.utils import is_torch_bf16_gpu_available

from trl_multiagent.environments.task_errors import describe
from trl_multiagent.limits import check_arguments


NO_SHARDING = "teams are trained with DDP or DeepSpeed"

if TYPE_CHECKING:
    from transformers import TrainingArguments as Base
else:
    # The fields of `TrainingArguments` would override those of the TRL configuration that follows in the bases
    Base = object


@dataclass
class LimitedArguments(Base):
    """
    Checks of the arguments that all trainers have. This class precedes the configuration class of a TRL trainer in the bases.
    """

    # See `check_arguments`
    refused: ClassVar[dict[str, str]] = {
        "label_names": "the data has no labels",
        "fsdp": NO_SHARDING,
        "fsdp_config": NO_SHARDING,
        "parallelism_config": NO_SHARDING,
        "enable_jit_checkpoint": "a recipe saves a checkpoint at SIGTERM and Ctrl-C without it",
    }
    positive: ClassVar[tuple[str, ...]] = (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "adam_epsilon",
        "ddp_timeout",
    )

    def __post_init__(self) -> None:
        check_arguments(self)
        if not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise, several processes could not communicate
        if self.bf16 is None:
            self.bf16: bool | None = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        super().__post_init__()
        self._check_combinations()
        self._try_arguments()

    def _check_combinations(self) -> None:
        """
        Checks arguments that depend on each other.

        Raises:
            ValueError: an argument lacks another one.
        """
        if self.save_strategy == "best" and self.eval_strategy == "no":
            raise ValueError("`save_strategy` is 'best', which needs evaluations: set `eval_strategy`.")
        if self.fp16 and self.device.type == "cpu":
            raise ValueError("`fp16` needs a GPU: set it to False, or use `bf16`.")

    def _try_arguments(self) -> None:
        """
        Uses the arguments of other libraries once, on a single number, to find out what these libraries refuse.

        Raises:
            ValueError: they refuse an argument, or a package is missing.
        """
        number = torch.nn.Parameter(torch.zeros(1))
        with explain("log_level", self.log_level, "log_level_replica", self.log_level_replica):
            self.get_process_log_level()
        names = ("multiprocessing_context", "persistent_workers", "prefetch_factor")
        given = {name: getattr(self, f"dataloader_{name}") for name in names}
        with explain("dataloader_num_workers", self.dataloader_num_workers, "dataloader_*", given):
            DataLoader([0], num_workers=self.dataloader_num_workers, **given)
        with explain("optim", self.optim.value, "optim_args", self.optim_args):
            optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(self)
            if optimizer_class.__module__.startswith("torch."):  # others may need a GPU
                optimizer_class([number], **kwargs)
        if self.rounds_stochastically and (self.world_size > 1 or self.deepspeed_plugin is not None):
            raise ValueError(
                "`bf16_stochastic_round` in `optim_args` works in one process without DeepSpeed: several processes would round "
                "differently. Remove it and use DeepSpeed ZeRO, which splits float32 weights among the processes."
            )
        with explain(
            "lr_scheduler_type", self.lr_scheduler_type.value, "lr_scheduler_kwargs", self.lr_scheduler_kwargs
        ):
            optimizer = torch.optim.SGD([number], lr=1.0)
            scheduler = get_scheduler(
                self.lr_scheduler_type,
                optimizer,
                num_warmup_steps=1,
                num_training_steps=4,
                scheduler_specific_kwargs=self.lr_scheduler_kwargs,
            )
            if isinstance(scheduler, LambdaLR):  # one that reads the arguments at every step
                for _ in range(4):
                    optimizer.step()
                    scheduler.step()
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
            kwargs = getattr(self, name, None) or {}
            with explain("gradient_checkpointing", self.gradient_checkpointing, name, kwargs):
                checkpoint(torch.square, number, **{"use_reentrant": True, **kwargs})

    @property
    def rounds_stochastically(self) -> bool:
        """Whether the optimizer is for weights in bfloat16: its rounding keeps the mean of updates that are too small for them."""
        return bool(Trainer.get_optimizer_cls_and_kwargs(self)[1].get("bf16_stochastic_round"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hub_token": None}  # because `training_args.bin` is pushed to the Hub


@contextlib.contextmanager
def explain(name: str, value: Any, more: str, kwargs: Any) -> Iterator[None]:
    """Turns an error of another library into a `ValueError` that names the argument and the one that holds its details."""
    try:
        yield
    except (ImportError, ValueError, TypeError, KeyError, ArithmeticError, AttributeError, RuntimeError) as error:
        given = f" with the `{more}` {kwargs!r}" if kwargs else ""
        raise ValueError(f"`{name}` is {value!r}, which cannot be used{given}: {describe(error)}") from error

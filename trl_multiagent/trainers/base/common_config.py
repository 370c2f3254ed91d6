"""The configuration that all trainers of this package share."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate.utils import is_deepspeed_available
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import Trainer, get_scheduler
from transformers.utils import is_torch_bf16_gpu_available

from trl_multiagent.limits import check_arguments


NO_SHARDING = "teams are trained with DDP or DeepSpeed"
ROUNDING = "an evaluation would round the trained weights for good; `bf16` computes in bfloat16"
# Keys of a DeepSpeed configuration that replace the float32 copy of the trained weights, or the optimizer's float32
# state
LOW_MASTERS = [("bf16", "bf16_master_weights_and_grads"), ("bf16", "bf16_optimizer_states")]
LOW_MASTERS += [("fp16", "fp16_master_weights_and_grads")]
# Not `TrainingArguments`, although the methods below need it: its fields would override those of the TRL configuration
# among the bases
Base: Any = object


@dataclass
class CommonConfig(Base):
    """
    Checks the arguments that all trainers have. This class precedes the configuration class of a TRL trainer in the
    bases.
    """

    # See `check_arguments`
    refused: ClassVar[dict[str, str]] = {
        "label_names": "the data has no labels",
        "fsdp": NO_SHARDING,
        "fsdp_config": NO_SHARDING,
        "parallelism_config": NO_SHARDING,
        **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), ROUNDING),
        "enable_jit_checkpoint": "a recipe saves a checkpoint at SIGTERM and Ctrl-C without it",
    }
    positive: ClassVar[tuple[str, ...]] = (
        *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        *("num_train_epochs", "adam_epsilon", "ddp_timeout"),
    )

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.deepspeed is not None and not is_deepspeed_available():
            raise ImportError("`deepspeed` needs DeepSpeed: `pip install trl-multiagent[deepspeed]`.")
        if not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise, several processes could not communicate
        if self.bf16 is None:
            self.bf16: bool | None = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        super().__post_init__()
        self._check_combinations()
        self._try_arguments()

    def _check_combinations(self) -> None:
        """Raises `ValueError` if an argument contradicts another one, or needs one that is missing."""
        if self.save_strategy == "best" and self.eval_strategy == "no":
            raise ValueError("`save_strategy` is 'best', which needs evaluations: set `eval_strategy`.")
        if self.fp16 and self.device.type == "cpu":
            raise ValueError("`fp16` needs a GPU: set it to False, or use `bf16`.")
        if self.world_size > 1 and not self.accelerator_config.even_batches:
            raise ValueError(
                "`accelerator_config` has `even_batches: false`: processes with more batches would wait for those "
                "with fewer, or "
                "update alone. Leave it true."
            )
        sections = self.deepspeed_plugin.deepspeed_config if self.deepspeed_plugin is not None else {}
        for name, key in LOW_MASTERS:
            if sections.get(name, {}).get(key):
                raise ValueError(
                    f"The DeepSpeed configuration has `{key}`, with which small updates are lost in 16 bits: "
                    "remove it."
                )
        if self.rounds_stochastically and (self.world_size > 1 or self.deepspeed_plugin is not None):
            raise ValueError(
                "`bf16_stochastic_round` in `optim_args` works in one process without DeepSpeed: several "
                "processes would round "
                "differently. Remove it and use DeepSpeed ZeRO, which splits float32 weights among the processes."
            )

    def _try_arguments(self) -> None:
        """
        Tries arguments on a single number, so that torch and transformers raise their errors before a model is loaded.
        """
        number = torch.nn.Parameter(torch.zeros(1))
        self.get_process_log_level()
        names = ("num_workers", "multiprocessing_context", "persistent_workers", "prefetch_factor")
        DataLoader([0], **{name: getattr(self, f"dataloader_{name}") for name in names})
        optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(self)
        if optimizer_class.__module__.startswith("torch."):  # others may need a GPU
            optimizer_class([number], **kwargs)
        optimizer = torch.optim.SGD([number], lr=1.0)
        steps, kwargs = {"num_warmup_steps": 1, "num_training_steps": 4}, self.lr_scheduler_kwargs
        scheduler = get_scheduler(self.lr_scheduler_type, optimizer, **steps, scheduler_specific_kwargs=kwargs)
        if isinstance(scheduler, LambdaLR):  # it reads the arguments at every step
            for _ in range(4):
                optimizer.step()
                scheduler.step()
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
            checkpoint(torch.square, number, **{"use_reentrant": True, **(getattr(self, name, None) or {})})

    @property
    def rounds_stochastically(self) -> bool:
        """Whether the optimizer rounds bfloat16 weights stochastically, so that small updates are kept on average."""
        return bool(Trainer.get_optimizer_cls_and_kwargs(self)[1].get("bf16_stochastic_round"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hub_token": None}  # because `training_args.bin` is pushed to the Hub


def check_trained_weights(weights: Iterable[tuple[str, torch.nn.Parameter]], args: CommonConfig) -> None:
    """
    Checks that trained weights, the named parameters of a module, do not lose small updates. In bfloat16, a change of
    less than about 1/256 of a weight is rounded away. DeepSpeed in mixed precision has a float32 copy of the trained
    weights.

    Raises:
        ValueError: a trained weight has 16 bits and the optimizer rounds to the nearest number, or the optimizer
        rounds stochastically and
            there is nothing to round; or an adapter has whole modules in float32 that meet a base in 16 bits without
            autocast.
    """
    weights = list(weights)
    all_low = {name: x for name, x in weights if x.dtype in (torch.bfloat16, torch.float16)}
    low = {name: x for name, x in all_low.items() if x.requires_grad}
    if args.rounds_stochastically:
        if not low:
            raise ValueError(
                "`bf16_stochastic_round` in `optim_args` is for trained weights in bfloat16, but they are "
                "float32: load the model with "
                "`dtype='bfloat16'`, or remove it. LoRA adapters are always float32."
            )
        low = {name: x for name, x in low.items() if x.dtype == torch.float16}  # torchao rounds bfloat16 alone
    has_float32_copy = args.deepspeed_plugin is not None and (args.bf16 or args.fp16)
    copied = [name for name, x in weights if x.requires_grad and ".modules_to_save." in name]
    if copied and all_low and not low and not args.bf16 and not args.fp16:
        raise ValueError(
            f"The trained weight {copied[0]!r} is float32, and the base is "
            f"{str(next(iter(all_low.values())).dtype).removeprefix('torch.')}: "
            "set `bf16=True`, so that both compute in one data type."
        )
    if has_float32_copy or not low:
        return
    name, weight = next(iter(low.items()))
    raise ValueError(
        f"The trained weight {name!r} is {str(weight.dtype).removeprefix('torch.')}, in which small updates are "
        "lost: load the model with "
        "`dtype='float32'`, and set `bf16=True` to compute in bfloat16. Where memory forbids this, keep bfloat16 with "
        "`optim='adamw_torch_8bit'` and `optim_args='bf16_stochastic_round=True'`."
    )

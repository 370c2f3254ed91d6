"""The configuration that all trainers of this package share."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from accelerate.utils import is_deepspeed_available
from transformers import Trainer
from transformers.utils import is_torch_bf16_gpu_available

from trl_multiagent.jobs.distributed import connecting
from trl_multiagent.limits import check_arguments


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

    # Arguments of TRL and transformers that must keep their defaults
    unsupported: ClassVar[tuple[str, ...]] = (
        *("label_names", "fsdp", "fsdp_config", "parallelism_config", "bf16_full_eval", "fp16_full_eval"),
        "enable_jit_checkpoint",
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
        self.get_process_log_level()  # raises an error for unknown levels
        self._check_combinations()

    @cached_property
    def _setup_devices(self) -> torch.device:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return super()._setup_devices
        with connecting():
            return super()._setup_devices

    def _check_combinations(self) -> None:
        """Raises `ValueError` if an argument contradicts another one, or needs one that is missing."""
        if self.save_strategy == "best" and self.eval_strategy == "no":
            raise ValueError("`save_strategy` is 'best', which needs evaluations: set `eval_strategy`.")
        if self.fp16 and self.device.type == "cpu":
            raise ValueError("`fp16` needs a GPU: set it to False, or use `bf16`.")
        if self.world_size > 1 and not self.accelerator_config.even_batches:
            raise ValueError(
                "`accelerator_config` has `even_batches: false`: processes with more batches would wait for those "
                "with fewer, or update alone. Leave it true."
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
                "`bf16_stochastic_round` in `optim_args` is for trained weights in bfloat16, but they are float32: "
                "load the model with `dtype='bfloat16'`, or remove it. LoRA adapters are always float32."
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
        f"The trained weight {name!r} is {str(weight.dtype).removeprefix('torch.')}, in which small updates are lost: "
        "load the model with `dtype='float32'`, and set `bf16=True` to compute in bfloat16. Where memory forbids "
        "this, keep bfloat16 with `optim='adamw_torch_8bit'` and `optim_args='bf16_stochastic_round=True'`."
    )

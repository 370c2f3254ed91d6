"""The values that the arguments of `TrainingArguments` may have in every trainer of this package."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, get_scheduler
from transformers.utils import is_torch_bf16_gpu_available

from trl_multiagent.environments.task_errors import describe
from trl_multiagent.limits import check_arguments


# The integrations of transformers
REPORT_TO = (
    "none",
    "all",
    "azure_ml",
    "clearml",
    "codecarbon",
    "comet_ml",
    "dagshub",
    "dvclive",
    "flyte",
    "kubeflow",
    "mlflow",
    "neptune",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)

# The arguments of `torch.utils.checkpoint.checkpoint`
CHECKPOINTING_ARGUMENTS = (
    "use_reentrant",
    "preserve_rng_state",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
)

if TYPE_CHECKING:
    from transformers import TrainingArguments as Base
else:
    # The fields of `TrainingArguments` would override those of the TRL configuration that follows in the bases
    Base = object


@dataclass
class LimitedArguments(Base):
    """
    Limits of the arguments that all trainers have. This class precedes the configuration class of a TRL trainer in the bases.
    """

    # See `Limits`. Settings are checked against it before this module is imported
    limits: ClassVar[dict[str, dict[str, Any]]] = {
        "learning_rate": {"ge": 0, "le": 1000},
        "per_device_train_batch_size": {"ge": 1, "le": 1000000000},
        "per_device_eval_batch_size": {"ge": 1, "le": 1000000000},
        "gradient_accumulation_steps": {"ge": 1, "le": 1000000},
        "num_train_epochs": {"gt": 0, "le": 1000000},
        "max_steps": {"ge": 1, "le": 1000000000000, "also": (-1,)},
        "warmup_steps": {"ge": 0, "le": 1000000000000},
        "weight_decay": {"ge": 0, "le": 1000},
        "adam_beta1": {"ge": 0, "lt": 1},
        "adam_beta2": {"ge": 0, "lt": 1},
        "adam_epsilon": {"gt": 0, "le": 1},
        "max_grad_norm": {"ge": 0},
        "torch_empty_cache_steps": {"ge": 1},
        "seed": {"ge": 0, "le": 4294967295},  # numpy takes no other
        "data_seed": {"ge": 0, "le": 4294967295},
        "logging_steps": {"gt": 0},
        "log_level": {"choices": ("detail", "debug", "info", "warning", "error", "critical", "passive")},
        "log_level_replica": {"choices": ("detail", "debug", "info", "warning", "error", "critical", "passive")},
        "report_to": {"choices": REPORT_TO},
        "eval_steps": {"gt": 0, "needs": "eval_strategy"},
        "eval_delay": {"ge": 0, "needs": "eval_strategy"},
        "save_steps": {"gt": 0, "needs": "save_strategy"},
        "save_total_limit": {"ge": 1, "needs": "save_strategy"},
        "dataloader_num_workers": {"ge": 0, "le": 1024},
        "dataloader_prefetch_factor": {"ge": 1, "le": 1024, "needs": "dataloader_num_workers"},
        "dataloader_multiprocessing_context": {"choices": ("fork", "spawn", "forkserver")},
        "ddp_backend": {"choices": ("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl")},
        "ddp_timeout": {"ge": 1, "le": 31536000},
        "ddp_bucket_cap_mb": {"ge": 1, "le": 1000000},
        "activation_checkpointing_kwargs": {"keys": CHECKPOINTING_ARGUMENTS},
        "gradient_checkpointing_kwargs": {"keys": CHECKPOINTING_ARGUMENTS},
        "eval_accumulation_steps": {"ge": 1, "needs": "eval_strategy"},
        "include_num_input_tokens_seen": {"choices": ("all", "non_padding", "no", True, False)},
        "train_sampling_strategy": {"choices": ("random", "sequential", "group_by_length", "batch_rebalance")},
        "label_names": {"refused": "the data has no labels"},
        "hub_private_repo": {"needs": "push_to_hub"},
        "hub_always_push": {"needs": "push_to_hub"},
        "hub_revision": {"needs": "push_to_hub"},
        "greater_is_better": {"needs": "metric_for_best_model"},
        "bf16": {"differs": "by default on where the hardware has it"},
        "do_train": {"no_effect": "a trainer trains when `train()` is called"},
        "do_eval": {"no_effect": "`eval_strategy` says whether there is an evaluation"},
        "do_predict": {"no_effect": "there is no prediction"},
        "local_rank": {"no_effect": "`accelerate launch` says which process this is"},
        "fsdp": {"refused": "teams are trained with DDP or DeepSpeed"},
        "fsdp_config": {"refused": "teams are trained with DDP or DeepSpeed"},
        "enable_jit_checkpoint": {"refused": "a recipe saves a checkpoint at SIGTERM and Ctrl-C without it"},
        "parallelism_config": {"refused": "teams are trained with DDP or DeepSpeed"},
    }

    def __post_init__(self) -> None:
        check_arguments(self)
        if not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise, several processes could not communicate
        if self.bf16 is None:
            self.bf16: bool | None = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        super().__post_init__()
        self._check_combinations()
        self._check_optimizer()

    def _check_combinations(self) -> None:
        """
        Checks arguments that depend on each other.

        Raises:
            ValueError: an argument lacks another one.
        """
        if self.save_strategy == "best" and self.eval_strategy == "no":
            raise ValueError("`save_strategy` is 'best', which needs evaluations: set `eval_strategy`.")
        if self.dataloader_persistent_workers and self.dataloader_num_workers == 0:
            raise ValueError("`dataloader_persistent_workers` needs workers: set `dataloader_num_workers`.")
        if self.fp16 and self.device.type == "cpu":
            raise ValueError("`fp16` needs a GPU: set it to False, or use `bf16`.")
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
            for key in ("use_reentrant", "preserve_rng_state", "debug", "early_stop"):
                value = (getattr(self, name) or {}).get(key, True)
                if not isinstance(value, bool):
                    raise ValueError(f"`{name}` has {value!r} for {key!r}, it must be true or false.")

    def _check_optimizer(self) -> None:
        """
        Makes the optimizer's class and the learning rate schedule once, to find out what they need.

        Raises:
            ValueError: a package or an argument of the schedule is missing.
        """
        try:
            Trainer.get_optimizer_cls_and_kwargs(self)
        except (ImportError, ValueError, TypeError) as error:
            given = "" if not self.optim_args else f" with the `optim_args` {self.optim_args!r}"
            raise ValueError(
                f"`optim` is {self.optim.value!r}, which cannot be used{given}: {describe(error)}"
            ) from error
        if self.rounds_stochastically and (self.world_size > 1 or self.deepspeed_plugin is not None):
            raise ValueError(
                "`bf16_stochastic_round` in `optim_args` works in one process without DeepSpeed: several processes would round "
                "differently. Remove it and use DeepSpeed ZeRO, which splits float32 weights among the processes."
            )
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        try:
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
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            raise ValueError(
                f"`lr_scheduler_type` {self.lr_scheduler_type.value!r} does not go with `lr_scheduler_kwargs` "
                f"{self.lr_scheduler_kwargs}: {describe(error)}"
            ) from error

    @property
    def rounds_stochastically(self) -> bool:
        """Whether the optimizer is for weights in bfloat16: its rounding keeps the mean of updates that are too small for them."""
        return bool(Trainer.get_optimizer_cls_and_kwargs(self)[1].get("bf16_stochastic_round"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hub_token": None}  # because `training_args.bin` is pushed to the Hub

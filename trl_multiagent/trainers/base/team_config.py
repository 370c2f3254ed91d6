"""The configurations of all trainers, and of those that train a team."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from accelerate.utils import is_deepspeed_available
from torch.optim import SGD
from transformers import Trainer, get_scheduler
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils import is_liger_kernel_available, is_torch_bf16_gpu_available, logging

from trl_multiagent.console import install_command
from trl_multiagent.jobs.distributed import connecting
from trl_multiagent.limits import setting


logger = logging.get_logger(__name__)


def has_bf16_products(on_cpu: bool) -> bool:
    """
    Returns whether products in bfloat16 are quicker than in float32: on a GPU, or on a CPU with AMX, or with AVX-512
    BF16 if it is not Intel's, which takes twice as long.
    """
    if on_cpu:
        found: Any = getattr(torch.cpu, "get_capabilities", dict)()  # of an older torch, nothing
        return found.get("amx_tile", False) or (
            found.get("avx512_bf16", False) and "Intel" not in found.get("cpu_name", "")
        )
    return is_torch_bf16_gpu_available()


# Not `TrainingArguments`, although the methods below need it: its fields would override the fields of the TRL
# configuration among the bases
Base: Any = object


@dataclass
class CommonConfig(Base):
    """
    Checks the arguments that all trainers have. This class precedes the configuration class of a TRL trainer in the
    bases.

    Parameters:
        logging_steps (`float`, *optional*, defaults to `0.01`): Optimizer steps between log entries; below 1, as a
            share of all steps. The default logs up to 100 times: each step of a training of up to 100.
        eval_steps (`float`, *optional*, defaults to `10`): Optimizer steps between evaluations with
            `eval_strategy="steps"`; below 1, as a share of all steps.
    """

    # Arguments of TRL and transformers that must keep their defaults
    unsupported: ClassVar[list[str]] = """
        label_names fsdp fsdp_config parallelism_config bf16_full_eval fp16_full_eval enable_jit_checkpoint
        label_smoothing_factor remove_unused_columns chat_template_path
    """.split()

    logging_steps: float = setting(default=0.01, ge=0)
    eval_steps: float | None = setting(default=10, ge=0)

    def __post_init__(self) -> None:
        if self.deepspeed is not None and not is_deepspeed_available():
            raise ImportError(f"`deepspeed` needs DeepSpeed: {install_command('deepspeed')}.")
        if self.use_liger_kernel and not is_liger_kernel_available():
            raise ImportError("`use_liger_kernel` needs Liger: pip install liger-kernel.")
        if not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise, several processes could not communicate
        if self.bf16 is None:
            self.bf16: bool | None = not self.fp16 and has_bf16_products(self.use_cpu)
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
        if unknown := {*map(str, self.report_to)} - INTEGRATION_TO_CALLBACK.keys():
            raise ValueError(
                f"`report_to` has {min(unknown)!r}; it must be none, all, or some of "
                f"{', '.join(sorted(INTEGRATION_TO_CALLBACK))}."
            )
        # A wrong schedule would otherwise show only after models have been loaded
        get_scheduler(
            self.lr_scheduler_type, SGD([torch.zeros(1)], self.learning_rate), 0, 1, self.lr_scheduler_kwargs
        )
        if self.save_strategy == "best" and self.eval_strategy == "no":
            raise ValueError("`save_strategy` is 'best', which needs evaluations: set `eval_strategy`.")
        if self.fp16 and self.device.type == "cpu":
            raise ValueError("`fp16` needs a GPU: set it to False, or use `bf16`.")
        if self.bf16 and not has_bf16_products(self.device.type == "cpu"):
            logger.warning("On this processor, bfloat16 can take many times as long as float32: try `bf16: false`.")
        if self.world_size > 1 and not self.accelerator_config.even_batches:
            raise ValueError(
                "`accelerator_config` has `even_batches: false`: processes with more batches would wait for those "
                "with fewer, or update alone. Leave it true."
            )
        if (self.accelerator_config.gradient_accumulation_kwargs or {}).get("num_steps", 1) != 1:
            raise ValueError("`accelerator_config` has `num_steps`: set `gradient_accumulation_steps` instead.")
        if self.rounds_stochastically and (self.world_size > 1 or self.deepspeed_plugin is not None):
            raise ValueError(
                "`bf16_stochastic_round` in `optim_args` works in one process without DeepSpeed: several processes "
                "would round differently. Remove it and use DeepSpeed ZeRO, which splits float32 weights among them."
            )

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO, 0 without DeepSpeed."""
        return 0 if self.deepspeed_plugin is None else self.deepspeed_plugin.zero_stage

    @property
    def rounds_stochastically(self) -> bool:
        """Whether the optimizer rounds bfloat16 weights stochastically, so that small updates are kept on average."""
        return bool(Trainer.get_optimizer_cls_and_kwargs(self)[1].get("bf16_stochastic_round"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hub_token": None}  # because `training_args.bin` is pushed to the Hub


@dataclass
class TeamConfig(CommonConfig):
    r"""
    Arguments of every team trainer. This class precedes the configuration class of a TRL trainer in the bases.

    Parameters:
        agent_learning_rates (`dict[str, float]`, *optional*): Learning rate per role. Agents without an entry use
            `learning_rate`.
        frozen_agents (`list[str]`, *optional*): Roles of agents that generate but are not trained.
        devices (`dict[str, int]`, *optional*): The GPU of each role, such as `{"aux": 0, "main": 1}`, for agents with
            a model each that one process trains. By default, all agents are on the device of the process.
        resume_changes (`str`, *optional*, defaults to `"refuse"`): Whether to `"refuse"` or `"allow"` resuming from a
            checkpoint of a run with other settings, another environment or other data. Changes that are allowed are
            recorded in later checkpoints, the output folder and the model card.
        disable_dropout (`bool`, *optional*, defaults to `True`): Whether the update is computed without dropout, like
            the sampling. This covers every kind of dropout, including `lora_dropout`, layer dropping and router noise.
    """

    # Beginnings of the names of arguments that a resumed run may change freely, because neither the update nor the
    # rollout depends on them
    free_on_resume: ClassVar[tuple[str, ...]] = ("devices", "log_", "model_init_", "resume_changes", "trust_remote_")

    unsupported: ClassVar[list[str]] = """
        model_init_kwargs auto_find_batch_size neftune_noise_alpha optim_target_modules sync_ref_model
        ref_model_mixup_alpha ref_model_sync_steps pad_to_multiple_of
        off_policy_mask_threshold steps_per_generation generation_batch_size
        sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
        entropy_coef entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target use_adaptive_entropy
        top_entropy_quantile use_transformers_continuous_batching use_transformers_paged
        transformers_continuous_batching_config cast_lm_head_to_fp32 reward_weights
        multi_objective_aggregation max_tool_calling_iterations log_unique_prompts log_completions_hub_repo
        ld_alpha padding_free activation_offloading pad_token truncation_mode label_smoothing discopop_tau
        f_divergence_type f_alpha_divergence_coef use_weighting precompute_ref_log_probs
        precompute_ref_batch_size
    """.split()

    agent_learning_rates: dict[str, float] | None = setting(ge=0)
    frozen_agents: list[str] | None = setting()
    devices: dict[str, int] | None = setting(ge=0)
    resume_changes: str = setting(default="refuse", choices=("refuse", "allow"))
    disable_dropout: bool = setting(default=True)

    def critic_names(self, roles: Sequence[str]) -> list[str]:
        """Returns the names of the critics of a team with these roles."""
        return []

    def _check_combinations(self) -> None:
        super()._check_combinations()
        if self.world_size > 1 and self.accelerator_config.split_batches:
            raise ValueError(
                "`accelerator_config` has `split_batches: true`, but `items_per_device` counts the items of one "
                "process. Leave it false."
            )
        if self.torch_compile:
            if self.zero_stage == 3:
                raise ValueError("`torch_compile` compiles layers, but ZeRO-3 gathers their weights: leave it out.")
            try:
                torch.compile(len, backend=self.torch_compile_backend, mode=self.torch_compile_mode)
            except RuntimeError as error:  # of the names alone: nothing is compiled yet
                raise ValueError(f"`torch_compile_backend` or `torch_compile_mode`: {error}") from None
        if self.devices is None:
            return
        if self.world_size > 1 or self.deepspeed_plugin is not None:
            raise ValueError("`devices` is for one process without DeepSpeed: leave it out, or start one process.")
        if self.device.type == "cpu":
            logger.warning("`devices` has no effect: this machine has no GPU, and all agents are on the CPU.")
        elif max(self.devices.values()) >= (available := torch.accelerator.device_count()):
            raise ValueError(f"`devices` is {self.devices}, but this machine has the GPUs 0 to {available - 1}.")


def check_trained_weights(weights: Iterable[tuple[str, torch.nn.Parameter]], args: CommonConfig) -> None:
    """
    Checks that trained weights, the named parameters of a module, do not lose small updates. In bfloat16, a change of
    less than about 1/256 of a weight is rounded away. DeepSpeed in mixed precision has a float32 copy of the trained
    weights.

    Raises:
        ValueError: a trained weight has 16 bits and the optimizer rounds to the nearest number, or the optimizer
            rounds stochastically and there is nothing to round.
    """
    low = [(name, x.dtype) for name, x in weights if x.requires_grad and x.dtype in (torch.bfloat16, torch.float16)]
    if args.rounds_stochastically:
        if not low:
            raise ValueError(
                "`bf16_stochastic_round` in `optim_args` is for trained weights in bfloat16, but they are float32: "
                "load the model with `dtype='bfloat16'`, or remove it. LoRA adapters are always float32."
            )
        low = [(name, dtype) for name, dtype in low if dtype == torch.float16]  # torchao rounds bfloat16 alone
    has_float32_copy = args.deepspeed_plugin is not None and (args.bf16 or args.fp16)
    if has_float32_copy or not low:
        return
    name, dtype = low[0]
    raise ValueError(
        f"The trained weight {name!r} is {str(dtype).removeprefix('torch.')}, in which small updates are lost: "
        "load the model with `dtype='float32'`, and set `bf16=True` to compute in bfloat16. Where memory forbids "
        "this, keep bfloat16 with `optim='adamw_torch_8bit'` and `optim_args='bf16_stochastic_round=True'`."
    )

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from trl_multiagent.limits import setting
from trl_multiagent.trainers.base.common_config import CommonConfig


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

    # Arguments that a resumed run may change freely, because neither the update nor the rollout depends on them
    free_on_resume: ClassVar[tuple[str, ...]] = ("devices", "model_init_kwargs", "resume_changes", "trust_remote_code")
    free_prefixes_on_resume: ClassVar[tuple[str, ...]] = ("log_",)

    unsupported: ClassVar[tuple[str, ...]] = (
        *("model_init_kwargs", "auto_find_batch_size", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
        *("neftune_noise_alpha", "optim_target_modules", "use_liger_kernel", "liger_kernel_config"),
    )

    agent_learning_rates: dict[str, float] | None = setting(ge=0, le=1000)
    frozen_agents: list[str] | None = setting()
    devices: dict[str, int] | None = setting(ge=0, le=1023)
    resume_changes: str = setting(default="refuse", choices=("refuse", "allow"))
    disable_dropout: bool = setting(default=True)

    def critic_names(self, trained_roles: Sequence[str]) -> list[str]:
        """Returns the names of the critics for these trained agents."""
        return []

    def _check_combinations(self) -> None:
        super()._check_combinations()
        if self.load_best_model_at_end and self.metric_for_best_model == "loss":
            raise ValueError("`load_best_model_at_end` needs a `metric_for_best_model`, such as 'reward'.")
        if self.save_strategy == "best" and self.metric_for_best_model in (None, "loss"):
            raise ValueError("`save_strategy` is 'best', which needs a `metric_for_best_model`, such as 'reward'.")
        if self.world_size > 1 and self.accelerator_config.split_batches:
            raise ValueError(
                "`accelerator_config` has `split_batches: true`, but `items_per_device` counts the items of one "
                "process. Leave it false."
            )
        self._check_devices()

    def _check_devices(self) -> None:
        if self.devices is None:
            return
        if self.world_size > 1 or self.deepspeed_plugin is not None:
            raise ValueError("`devices` is for one process without DeepSpeed: leave it out, or start one process.")
        available = torch.accelerator.device_count() if self.device.type != "cpu" else max(self.devices.values()) + 1
        if max(self.devices.values()) >= available:
            raise ValueError(f"`devices` is {self.devices}, but this machine has the GPUs 0 to {available - 1}.")

    def steps_per_epoch(self, num_rows: int) -> int:
        """Returns the number of optimizer steps in one pass over a training dataset with this many rows."""
        micro_batches = num_rows / (self.per_device_train_batch_size * self.world_size)
        micro_batches = int(micro_batches) if self.dataloader_drop_last else math.ceil(micro_batches)
        return math.ceil(micro_batches / self.gradient_accumulation_steps)


@contextlib.contextmanager
def temporarily_set(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of an object to other values within the block."""
    saved = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(owner, name, value)

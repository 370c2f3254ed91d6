import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.utils import is_torch_bf16_gpu_available


if TYPE_CHECKING:
    from transformers import TrainingArguments as Base
else:
    # The fields of `TrainingArguments` would override those of the TRL configuration that follows in the bases
    Base = object


@dataclass
class TeamConfig(Base):
    r"""
    Arguments of every team trainer. This class precedes the configuration class of a TRL trainer in the bases.

    Parameters:
        agent_learning_rates (`dict[str, float]`, *optional*):
            Learning rate per role. Agents without an entry use `learning_rate`.
        frozen_agents (`list[str]`, *optional*):
            Roles of agents that generate but are not trained.
        resume_changes (`str`, *optional*, defaults to `"refuse"`):
            Whether to `"refuse"` or `"allow"` resuming from a checkpoint of a run with other settings, another
            environment or other data. Changes that are allowed are recorded in later checkpoints, the output folder
            and the model card.
        disable_dropout (`bool`, *optional*, defaults to `True`):
            Whether the update is computed without dropout, like the sampling. This covers every kind of dropout,
            including `lora_dropout`, layer dropping and router noise.
    """

    # Arguments that a resumed run may change freely, because neither the update nor the rollout depends on them
    free_on_resume: ClassVar[tuple[str, ...]] = ("model_init_kwargs", "resume_changes", "trust_remote_code")
    free_prefixes_on_resume: ClassVar[tuple[str, ...]] = ("log_",)

    agent_learning_rates: dict[str, float] | None = field(
        default=None, metadata={"help": "Learning rate per role; the others use `learning_rate`."}
    )
    frozen_agents: list[str] | None = field(
        default=None, metadata={"help": "Roles of agents that generate but are not trained."}
    )
    resume_changes: str = field(
        default="refuse",
        metadata={"help": "'refuse' to resume with other settings or data, or 'allow' it and record the changes."},
    )
    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Whether the update is computed without dropout, like the sampling."},
    )

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise, several processes could not communicate
        if self.bf16 is None:
            self.bf16: bool | None = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        check_choices(self, {"resume_changes": ("refuse", "allow")})
        super().__post_init__()

    def steps_per_epoch(self, num_rows: int) -> int:
        """Number of optimizer steps in one pass over a training dataset with this many rows."""
        micro_batches = num_rows / (self.per_device_train_batch_size * self.world_size)
        micro_batches = int(micro_batches) if self.dataloader_drop_last else math.ceil(micro_batches)
        return math.ceil(micro_batches / self.gradient_accumulation_steps)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hub_token": None}  # because `training_args.bin` is pushed to the Hub


def check_choices(args: Any, choices: Mapping[str, Collection[Any]]) -> None:
    """Raises an error if the value of an argument is none of its choices."""
    for name, allowed in choices.items():
        value = getattr(args, name)
        if value not in allowed:
            raise ValueError(f"`{name}` is {value!r}, it must be one of {', '.join(map(repr, allowed))}.")


def check_minima(args: Any, minima: Mapping[str, int]) -> None:
    """Raises an error if the value of an argument is below its minimum."""
    for name, minimum in minima.items():
        value = getattr(args, name)
        if value < minimum:
            raise ValueError(f"`{name}` is {value}, it must be at least {minimum}.")


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

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import is_torch_bf16_gpu_available


if TYPE_CHECKING:
    from transformers import TrainingArguments as Base
else:
    Base = object  # its fields would replace those of the TRL configuration that comes behind it in the bases


@dataclass
class TeamConfig(Base):
    r"""
    Arguments that every team trainer has. Goes before the configuration class of a TRL trainer in the bases.

    Parameters:
        agent_learning_rates (`dict[str, float]`, *optional*):
            Learning rate of the agents named; the others use `learning_rate`.
        frozen_agents (`list[str]`, *optional*):
            Roles of partners that generate but are not trained.
        resume_changes (`str`, *optional*, defaults to `"refuse"`):
            What to do with a checkpoint of a run with other settings, another environment or other data: `"refuse"` it, or
            `"allow"` the changes and record them in the later checkpoints, the output folder and the model card.
        disable_dropout (`bool`, *optional*, defaults to `True`):
            Whether the update is computed without dropout. It covers every kind of dropout, `lora_dropout` included, not only
            modules.
    """

    # Names of arguments that a resumed run may change freely, because they decide neither update nor rollout
    free_on_resume = ("model_init_kwargs", "resume_changes", "trust_remote_code")
    free_prefixes_on_resume = ("log_",)

    agent_learning_rates: dict[str, float] | None = field(
        default=None, metadata={"help": "Learning rate per role; the others use `learning_rate`."}
    )
    frozen_agents: list[str] | None = field(
        default=None, metadata={"help": "Roles of partners that generate but are not trained."}
    )
    resume_changes: str = field(
        default="refuse",
        metadata={"help": "'refuse' a checkpoint of a run with other settings or data, or 'allow' and record it."},
    )
    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Whether the update is computed without dropout, as the completions were sampled."},
    )

    def __post_init__(self):
        if not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise several processes would not find each other
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        check_choices(self, {"resume_changes": ("refuse", "allow")})
        super().__post_init__()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hub_token": None}  # `training_args.bin` is pushed


def check_choices(args: Any, choices: dict[str, Collection[Any]]) -> None:
    """Refuses arguments whose value is none of the choices."""
    for name, allowed in choices.items():
        value = getattr(args, name)
        if value not in allowed:
            raise ValueError(f"`{name}` is {value!r}, it must be one of {', '.join(map(repr, allowed))}.")


def check_minima(args: Any, minima: dict[str, int]) -> None:
    """Refuses arguments that are too small."""
    for name, minimum in minima.items():
        value = getattr(args, name)
        if value < minimum:
            raise ValueError(f"`{name}` is {value}, it must be at least {minimum}.")

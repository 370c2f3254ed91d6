from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers.utils import is_torch_bf16_gpu_available
from trl import RewardConfig


@dataclass
class JointRewardConfig(RewardConfig):
    r"""
    Configuration class for the [`JointRewardTrainer`].

    This class includes only the parameters that are specific to joint reward models. For a full list of training
    arguments, please refer to [`~trl.RewardConfig`] and [`~transformers.TrainingArguments`].

    Parameters:
        max_length (`int`, *optional*, defaults to `2048`):
            Tokens of a joint text. Longer ones lose the ends of their longest prompts, and never a part of an answer.
            With [`~trl.RewardConfig`], they would be left out.
        freeze_backbone (`bool`, *optional*, defaults to `False`):
            Whether to train only the head, which turns the last hidden state into the reward.
        eval_fraction (`float`, *optional*, defaults to `0.1`):
            Share of the items whose pairs are held out for evaluation, if no evaluation dataset is given. All pairs of
            an item are on the same side.
        prompt_template (`str`, *optional*):
            How the prompt of a role is written in the joint text, with `{role}` and `{text}`; by default
            [`~trl_multiagent.joint_text.PROMPT_TEMPLATE`].
        answer_template (`str`, *optional*):
            How the answer of a role is written; by default [`~trl_multiagent.joint_text.ANSWER_TEMPLATE`].

    > [!NOTE]
    > `bf16` defaults to `True` only where a GPU supports it.
    """

    limits: ClassVar[dict[str, dict[str, Any]]] = {"max_length": {"ge": 1}, "eval_fraction": {"ge": 0, "lt": 1}}

    max_length: int | None = field(
        default=2048,
        metadata={"help": "Tokens of a joint text; longer ones lose a part of the problem, never of an answer."},
    )
    freeze_backbone: bool = field(default=False, metadata={"help": "Whether to train only the head."})
    eval_fraction: float = field(
        default=0.1, metadata={"help": "Share of the items whose pairs are held out, if there is no evaluation set."}
    )
    prompt_template: str | None = field(
        default=None, metadata={"help": "How a prompt is written, with `{role}` and `{text}`."}
    )
    answer_template: str | None = field(
        default=None, metadata={"help": "How an answer is written, with `{role}` and `{text}`."}
    )

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if self.bf16 is None:
            self.bf16: bool | None = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"`eval_fraction` is {self.eval_fraction}, it must be at least 0 and less than 1.")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"`max_length` is {self.max_length}, it must be at least 1.")
        super().__post_init__()

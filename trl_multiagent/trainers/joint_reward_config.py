from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl import RewardConfig

from trl_multiagent.joint_text import check_template
from trl_multiagent.trainers.base.limited_arguments import LimitedArguments


@dataclass
class JointRewardConfig(LimitedArguments, RewardConfig):
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

    limits: ClassVar[dict[str, dict[str, Any]]] = {
        "max_length": {"ge": 1},
        "eval_fraction": {"ge": 0, "lt": 1},
        "center_rewards_coefficient": {"ge": 0, "le": 1000},
        "dataset_num_proc": {"ge": 1, "le": 1024},
        "pad_to_multiple_of": {"ge": 1, "le": 65536},
        "chat_template_path": {"refused": "joint texts have a wording of their own, see `prompt_template`"},
        "label_smoothing_factor": {"refused": "the loss has no labels"},
        "remove_unused_columns": {"refused": "the columns of the roles are read by their names"},
    }

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

    def _check_combinations(self) -> None:
        super()._check_combinations()
        kwargs = self.model_init_kwargs or {}
        if not isinstance(kwargs, dict):
            raise ValueError(f"`model_init_kwargs` is {kwargs!r}, it must be a mapping.")
        if "num_labels" in kwargs:
            raise ValueError("`model_init_kwargs` must not have 'num_labels': a reward model has one output.")
        for name in ("prompt_template", "answer_template"):
            if getattr(self, name) is not None:
                check_template(name, getattr(self, name))

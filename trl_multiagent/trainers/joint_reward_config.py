from dataclasses import dataclass

from trl import RewardConfig

from trl_multiagent.limits import check_arguments, explained, setting
from trl_multiagent.trainers.base.team_config import CommonConfig


@explained
@dataclass
class JointRewardConfig(CommonConfig, RewardConfig):
    r"""
    Configuration class for the [`JointRewardTrainer`].

    This class includes only the parameters that are specific to joint reward models. For a full list of training
    arguments, please refer to [`~trl.RewardConfig`] and [`~transformers.TrainingArguments`].

    Parameters:
        max_length (`int`, *optional*, defaults to `2048`): Largest number of tokens of a joint text. Longer texts lose
            the ends of their longest prompts, but never a part of an answer. [`~trl.RewardConfig`] would drop them.
        freeze_backbone (`bool`, *optional*, defaults to `False`):
            Whether to train only the head, which turns the last hidden state into the reward.
        eval_fraction (`float`, *optional*, defaults to `0.1`):
            Share of the items to hold out for evaluation, with all of their pairs, if no evaluation dataset is given.
        prompt_template (`str`, *optional*):
            How the prompt of a role is written in the joint text, with `{role}` and `{text}`; by default
            [`~trl_multiagent.models.joint_text.PROMPT_TEMPLATE`].
        answer_template (`str`, *optional*):
            How the answer of a role is written; by default [`~trl_multiagent.models.joint_text.ANSWER_TEMPLATE`].

    > [!NOTE]
    > `bf16` defaults to `True` where the hardware is quicker with it, else `False`.
    """

    max_length: int | None = setting(default=2048, ge=1)
    freeze_backbone: bool = setting(default=False)
    eval_fraction: float = setting(default=0.1, ge=0, lt=1)
    prompt_template: str | None = setting()
    answer_template: str | None = setting()

    def __post_init__(self) -> None:
        check_arguments(self)
        super().__post_init__()

    def _check_combinations(self) -> None:
        super()._check_combinations()
        if "num_labels" in (self.model_init_kwargs or {}):
            raise ValueError("`model_init_kwargs` must not have 'num_labels': a reward model has one output.")
        for name in ("prompt_template", "answer_template"):
            template = getattr(self, name)
            if template is not None and template.count("{text}") != 1:
                raise ValueError(f"`{name}` is {template!r}; it must contain {{text}} once.")

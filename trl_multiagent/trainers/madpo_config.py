from dataclasses import dataclass
from typing import ClassVar

from trl import DPOConfig

from trl_multiagent.limits import check_arguments, explained, setting
from trl_multiagent.rollout.options import SamplingOptions
from trl_multiagent.trainers.base.team_config import TeamConfig


LOSS_TYPES = ("sigmoid", "hinge", "ipo", "sft")


@explained
@dataclass
class MADPOConfig(SamplingOptions, TeamConfig, DPOConfig):
    r"""
    Configuration class for the [`MADPOTrainer`].

    This class includes only the parameters that are specific to MADPO training. For a full list of training arguments,
    please refer to [`TeamConfig`] (agents), [`~trl.DPOConfig`] and [`~transformers.TrainingArguments`].

    Parameters:
        reference_free (`bool`, *optional*, defaults to `False`):
            Whether to leave the reference policy out: log-ratios become log-probabilities.
        use_environment_step (`bool`, *optional*, defaults to `True`):
            Whether training on pairs that have rewards advances `env_step`, as if they were scored again.
        environment_steps_per_pair (`int`, *optional*, defaults to `2`): `env_step` increment per pair.
        num_turns (`int`, *optional*, defaults to `1`):
            Turns of the episodes that are played in an evaluation with an environment.

    The arguments of [`~rollout.options.SamplingOptions`] are about the completions that an evaluation with an
    environment samples. They do not apply to preferences, which are texts or messages themselves.

    > [!NOTE]
    > `remove_unused_columns` defaults to `False`.
    """

    free_on_resume: ClassVar[tuple[str, ...]] = (
        *TeamConfig.free_on_resume,
        *"dataset_num_proc num_turns max_completion_length temperature top_k top_p use_chat_template".split(),
    )

    reference_free: bool = setting(default=False)
    use_environment_step: bool = setting(default=True)
    environment_steps_per_pair: int = setting(default=2, ge=1)
    num_turns: int = setting(default=1, ge=1)
    beta: float = setting("Strength of the pull towards the reference policy.", 0.1, gt=0)
    remove_unused_columns: bool | None = False

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, str):
            self.loss_type: list[str] = [self.loss_type]
        if not self.loss_type or not {*self.loss_type} <= {*LOSS_TYPES}:
            raise ValueError(f"`loss_type` is {self.loss_type}; a team has the losses {', '.join(LOSS_TYPES)}.")
        check_arguments(self)
        super().__post_init__()

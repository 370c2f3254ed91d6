from dataclasses import dataclass, field

from trl_multiagent.trainers.base.rollout_config import RolloutConfig
from trl_multiagent.trainers.base.team_config import check_choices, check_minima


@dataclass
class MAGRPOConfig(RolloutConfig):
    r"""
    Configuration class for the [`MAGRPOTrainer`].

    This class includes only the parameters that are specific to MAGRPO training. For a full list of training
    arguments, please refer to [`RolloutConfig`] (rollout trees, rewards, batches), [`TeamConfig`] (agents),
    [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`]. Note that default values may differ from those in
    [`~trl.GRPOConfig`].

    Parameters:
        turn_gradient_weights (`list[float]`, *optional*):
            One factor per turn for the loss of that turn's rows; needs `handoff`. All 1.0 by default.
        advantage_mode (`str`, *optional*, defaults to `"mean"`):
            Baseline over the sibling set: `"mean"` (MAGRPO), `"rloo"` (MARLOO), `"max"` (MAReMax) or `"raw"`
            (MAREINFORCE, no baseline).
        advantage_normalization (`bool`, *optional*, defaults to `False`):
            Whether to standardise the advantages of a sibling set. With it the four modes are the same algorithm.
    """

    turn_gradient_weights: list[float] | None = field(
        default=None, metadata={"help": "One loss factor per turn, for `handoff` 'random' or 'best'."}
    )
    advantage_mode: str = field(
        default="mean", metadata={"help": "Baseline over the sibling set: 'mean', 'rloo', 'max' or 'raw'."}
    )
    advantage_normalization: bool = field(
        default=False, metadata={"help": "Whether to standardise the advantages of a sibling set."}
    )

    def __post_init__(self):
        if self.turn_gradient_weights is None:
            self.turn_gradient_weights = [1.0] * self.num_turns
        super().__post_init__()

    def _check_values(self):
        check_choices(self, {"advantage_mode": ("mean", "rloo", "max", "raw")})
        super()._check_values()
        check_minima(self, {"num_generations": 1 if self.advantage_mode == "raw" else 2})
        if len(self.turn_gradient_weights) != self.num_turns:
            raise ValueError(
                f"`turn_gradient_weights` has {len(self.turn_gradient_weights)} entries for {self.num_turns} turns; "
                "it needs one per turn."
            )
        if self.weighs_turns:
            if self.handoff is None:
                raise ValueError(
                    "`turn_gradient_weights` weigh the turns of a chain: set `handoff` to 'random' or 'best'. In a tree "
                    "the returns already tie the turns together; see `discount`."
                )
            if self.loss_type == "grpo":
                raise ValueError("`turn_gradient_weights` have no effect under `loss_type='grpo'`; use 'luspo'.")

    @property
    def weighs_turns(self) -> bool:
        """Whether the turns' losses have factors other than 1."""
        return set(self.turn_gradient_weights) != {1.0}

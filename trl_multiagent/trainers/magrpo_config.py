from dataclasses import dataclass

from trl_multiagent.limits import explained, setting
from trl_multiagent.trainers.base.rollout_config import RolloutConfig


@explained
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
            One factor per turn, which multiplies the loss of that turn's rows. Needs `handoff`. All 1.0 by default.
        advantage_mode (`str`, *optional*, defaults to `"mean"`):
            Baseline over the group: `"mean"` (MAGRPO), `"rloo"` (MARLOO), `"max"` (MAReMax) or `"raw"`
            (MAREINFORCE, no baseline).
        advantage_normalization (`bool` or `str`, *optional*, defaults to `False`): Whether to standardize the
            advantages within a group. If so, `advantage_mode` makes no difference. `"role"` standardizes each
            agent's advantages over the batch, as [Dr. MAS](https://huggingface.co/papers/2602.08847) does with its
            rewards. `"rewards"` standardizes the returns of each reward function over the group before they are
            summed, and each agent's advantages over the batch, as TRL does with
            `multi_objective_aggregation="normalize_then_sum"`.
        equal_episodes (`bool`, *optional*, defaults to `False`): Whether every episode has the same weight in an
            agent's policy loss, however many turns it has. By default, every turn has. Needs `branching="episodes"`.
        credit (`str`, *optional*): If set, a counterfactual reward is subtracted from an agent's return: the reward of
            the same joint action with the agent's answer replaced by an empty text (`"nothing"`) or by the agent's
            next completion at the node (`"sibling"`), see [`~rollout.credit`]. The environment scores up to N
            additional joint actions for each one. A `group_reward` is in no counterfactual reward.
    """

    turn_gradient_weights: list[float] | None = setting(ge=0)
    advantage_mode: str = setting(default="mean", choices=("mean", "rloo", "max", "raw"))
    advantage_normalization: bool | str = setting(default=False, choices=(False, True, "role", "rewards"))
    equal_episodes: bool = setting(default=False)
    credit: str | None = setting(choices=("nothing", "sibling"))

    def _check_values(self) -> None:
        super()._check_values()
        if self.num_generations == 1 and self.advantage_mode != "raw":
            raise ValueError("`num_generations` is 1; it must be at least 2: the baseline is taken over siblings.")
        if self.num_generations == 1 and self.advantage_normalization in (True, "rewards"):
            raise ValueError("`advantage_normalization` compares siblings: set `num_generations` to 2 or more.")
        if self.credit == "sibling" and (self.branching == "episodes" or self.num_generations == 1):
            raise ValueError(
                "`credit: sibling` replaces an answer by another one to the same prompt, which `branching: episodes` "
                "and `num_generations: 1` do not sample: use `credit: nothing`."
            )
        if self.equal_episodes and self.branching == "tree":
            raise ValueError("`equal_episodes` needs `branching: episodes`: the paths of a tree share their turns.")
        if self.credit and self.advantage_normalization == "rewards":
            raise ValueError("`credit` and `advantage_normalization: rewards` both replace the return: choose one.")
        if self.turn_gradient_weights is None:
            self.turn_gradient_weights = [1.0] * self.num_turns
        weights = self.turn_gradient_weights
        if len(weights) != self.num_turns:
            raise ValueError(
                f"`turn_gradient_weights` has {len(weights)} entries for {self.num_turns} turns; it needs one per "
                "turn."
            )
        if not any(weights):
            raise ValueError("`turn_gradient_weights` are all 0, so nothing would be learned; raise one of them.")
        if set(weights) != {1.0} and self.handoff is None:
            raise ValueError(
                "`turn_gradient_weights` apply to the turns of a chain: set `handoff` to 'random' or 'best'. In a "
                "tree, `discount` already weights the later turns."
            )


@explained
@dataclass
class MARLOOConfig(MAGRPOConfig):
    """Configuration class for the [`MARLOOTrainer`]: [`MAGRPOConfig`] with `advantage_mode="rloo"`."""

    advantage_mode: str = setting("Baseline over the group, 'rloo' here.", "rloo", choices=("rloo",))


@explained
@dataclass
class MAReMaxConfig(MAGRPOConfig):
    """Configuration class for the [`MAReMaxTrainer`]: [`MAGRPOConfig`] with `advantage_mode="max"`."""

    advantage_mode: str = setting("Baseline over the group, 'max' here.", "max", choices=("max",))


@explained
@dataclass
class MAREINFORCEConfig(MAGRPOConfig):
    """Configuration class for the [`MAREINFORCETrainer`]: [`MAGRPOConfig`] with `advantage_mode="raw"`."""

    advantage_mode: str = setting("Baseline over the group, 'raw' here.", "raw", choices=("raw",))

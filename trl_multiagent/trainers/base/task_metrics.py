"""The metrics of the episodes that a trainer played, in training or in an evaluation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers.trainer_utils import EvalLoopOutput

from trl_multiagent.environments.base import scoring_metrics
from trl_multiagent.hub.model_card import environment_name
from trl_multiagent.processes import fail_together
from trl_multiagent.rollout.tree import Node
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.rollout_metrics import RolloutTotals, rollout_totals, sum_totals


if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object  # the trainer itself follows in the bases of the class that mixes this in


class TaskMetricsMixin(Base):
    """Adds what the agents reached in an environment to a trainer's metrics and model card."""

    team: AgentTeam
    environment: Any  # an `Environment`; `None` in a trainer that needs none and was given none

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self._evaluated: list[RolloutTotals] = []  # the batches of the evaluation that is running
        return super().evaluation_loop(*args, **kwargs)

    def _card_environment(self) -> str | None:
        return None if self.environment is None else environment_name(self.environment)

    def _add_task_metrics(
        self, mode: str, levels: list[list[Node]], logged: dict[str, list[float]] | None = None
    ) -> RolloutTotals:
        """
        Adds the metrics of one batch of trees, or of episodes, to those that are logged next.

        Args:
            mode (`str`): `"train"` or `"eval"`.
            levels (`list[list[Node]]`): The nodes of each turn that this process played.
            logged (`dict[str, list[float]]`, *optional*): What reward functions logged about them.

        Returns:
            [`RolloutTotals`]: The totals of all processes.
        """
        end_tokens: dict[str, Sequence[int]] = {role: self.team.end_tokens(role) for role in self.team.roles}
        with fail_together(self.accelerator):
            scoring = scoring_metrics(self.environment)
            own = rollout_totals(levels, end_tokens, scoring, training=mode == "train", logged=logged)
        totals = sum_totals(gather_object([own]))
        metrics = self._metrics[mode]
        for name, value in totals.scoring.items():
            metrics[f"reward/{name}"].append(value)
        shown = totals
        if mode == "eval":  # every item counts the same, however they were split into batches
            self._evaluated.append(totals)
            shown = sum_totals(self._evaluated)
        values = {name: total.mean for name, total in shown.totals.items()}
        for role, ratio in shown.most_common_ratios().items():
            values[f"agents/{role}/completions/most_common_ratio"] = ratio
        values["reward_std"] = shown.totals["reward"].std
        for name, value in values.items():
            if mode == "eval":
                metrics[name] = [value]
            else:
                metrics[name].append(value)
        return totals

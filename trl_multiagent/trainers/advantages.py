"""
Advantages that depend on more than a group of siblings: on the reward functions, the batch, or the whole episode.

`advantage_normalization="rewards"`: with the weights w_k of the reward functions and the return R_k of each alone,

    A_g = sum over k of  w_k * (R_kg - mean(R_k)) / (std(R_k) + 1e-4)

over the siblings, and each agent's advantages are then standardized over the batch. So each function has the influence
of its weight, whatever its scale, as in [GDPO](https://huggingface.co/papers/2601.05242). The formula is TRL's.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from trl.trainer.utils import nanstd

from trl_multiagent.environments.base import Environment
from trl_multiagent.environments.function_environment import FunctionEnvironment
from trl_multiagent.environments.reward_models import ModelRewardEnvironment
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.rollout.tree import Node, Trees, acting, groups_of, known, mean_of_known
from trl_multiagent.trainers.base.batch import Advantages
from trl_multiagent.trainers.base.metrics import totals_of_all
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


EPSILON = 1e-4  # TRL adds it to standard deviations


def weigh(
    args: MAGRPOConfig, environment: Environment, roles: Sequence[str], turns: Trees, advantages: Advantages
) -> None:
    """
    Changes the advantages of a batch in place, as `advantage_normalization` and `equal_episodes` say.

    With `equal_episodes`, an agent's advantages are divided by the number of its turns in the episode, and multiplied
    with the mean of this number over all episodes. The mean over rows is then a mean over episodes.
    """
    how = args.advantage_normalization
    of_node = {id(node): x for node, x in zip(chain(*turns), chain(*advantages), strict=True)}
    for role in roles:
        nodes = acting(role, [*chain(*turns)])
        if how == "rewards":
            for group in chain(*(groups_of(acting(role, of_turn)) for of_turn in turns)):
                summed = normalize_then_sum(environment, role, group, 0.0 if args.handoff else args.discount)
                for node, part in zip(group, summed.chunk(len(group)), strict=True):
                    of_node[id(node)][role] = part
        own = [of_node[id(node)] for node in nodes]
        values = [x for by_role in own for x in known(by_role[role].tolist())]
        lengths = Counter((node.tree, node.episode) for node in nodes)
        totals = totals_of_all({"values": values, "lengths": [*lengths.values()]})
        total = totals["values"]
        for node, by_role in zip(nodes, own, strict=True):
            if how == "rewards":
                by_role[role] = (by_role[role] - total.sum / max(1, total.count)) / (total.std + EPSILON)
            elif how == "role":
                by_role[role] = total.standardize(by_role[role]) + 0 * by_role[role]  # NaN stays NaN
            if args.equal_episodes:
                by_role[role] = by_role[role] * (totals["lengths"].mean / lengths[node.tree, node.episode])


def normalize_then_sum(environment: Environment, role: str, group: Sequence[Node], discount: float) -> torch.Tensor:
    """Returns the weighted sum of the standardized returns of a role's completions; NaN if no function gave one."""
    task = environment.unwrapped
    if isinstance(environment, ModelRewardEnvironment) or not isinstance(task, FunctionEnvironment):
        raise TaskError("`advantage_normalization: rewards` needs the reward functions of a `FunctionEnvironment`.")
    metrics = [f"rewards/{name}" for name in task.reward_names]
    rows = [
        [
            x
            for node in group
            for x in replace(node, returns=returns_of(node, role, y, discount), role_returns={}).agent_returns(role)
        ]
        for y in metrics
    ]
    returns = torch.tensor(rows, dtype=torch.float64)  # rounding would show where all are equal
    normalized = (returns - returns.nanmean(1, keepdim=True)) / (nanstd(returns, 1, keepdim=True) + EPSILON)
    summed = (normalized * torch.tensor(task.reward_weights).unsqueeze(1)).nansum(0)
    return summed.masked_fill(returns.isnan().all(0), math.nan).float()


def returns_of(node: Node, role: str, metric: str, discount: float) -> list[float]:
    """Returns the return of each joint action for a role that one reward function gives; NaN if it gives none."""
    values = [x.metrics.get(f"{metric}/{role}", x.metrics.get(metric, math.nan)) for x in node.outcomes]
    for action, child in node.children.items() if discount else ():  # 0 * NaN is NaN
        parts = known([values[action], discount * mean_of_known(returns_of(child, role, metric, discount))])
        values[action] = sum(parts) if parts else math.nan
    return values

"""
The rollout tree: nodes, joint actions, returns. Plain data, no model and no trainer.

All trees of a batch grow together, one turn at a time, so that the prompts, completions and outcomes of a whole level
are asked for in one call each.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trl_multiagent.environments.base import Environment, JointAction, Outcome, Prompt, Turn, ask, judge


@dataclass
class Samples:
    """
    What one agent sampled at one node.

    Args:
        prompt_ids (`list[int]`): Token ids of the whole prompt, history included.
        completion_ids (`list[list[int]]`): Token ids of the G completions, each up to its end-of-sequence token.
        texts (`list[str]`): The completions as text.
        logps (`list[list[float]]`, *optional*): The log-probabilities with which another engine than the policy itself
            sampled the tokens.
    """

    prompt_ids: list[int]
    completion_ids: list[list[int]]
    texts: list[str]
    logps: list[list[float]] | None = None


@dataclass
class Node:
    """
    One item with one history, from which every agent samples G completions.

    Args:
        item (`dict`): The dataset row.
        history (`tuple[Turn, ...]`): The branch's past turns.
        prompts (`dict[str, Prompt]`): What each agent is asked at this node.
        samples (`dict[str, Samples]`): What each agent sampled.
        indices (`list[tuple[int, ...]]`): One entry per joint action: the index of each agent's completion.
        outcomes (`list[Outcome]`): The environment's outcome of each joint action.
        rewards (`list[float]`): The processed reward of each joint action.
        children (`dict[int, Node]`): The node that each joint action opened; empty at a leaf.
        returns (`list[float]`): The return of each joint action.
        ended_early (`bool`): Whether early termination made this node a leaf.
    """

    item: dict
    history: tuple[Turn, ...]
    prompts: dict[str, Prompt]
    samples: dict[str, Samples] = field(default_factory=dict)
    indices: list[tuple[int, ...]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    children: dict[int, "Node"] = field(default_factory=dict)
    returns: list[float] = field(default_factory=list)
    ended_early: bool = False

    @property
    def joint_actions(self) -> list[JointAction]:
        return [
            {role: samples.texts[g] for (role, samples), g in zip(self.samples.items(), index, strict=True)}
            for index in self.indices
        ]

    def turn(self, joint_action: int) -> Turn:
        """This node as a past turn of the branch that one of its joint actions opens."""
        return Turn(self.prompts, self.joint_actions[joint_action], self.outcomes[joint_action])

    def agent_returns(self, agent: int) -> list[float]:
        """
        The return of each of an agent's completions: the mean over the joint actions that contain it.

        Args:
            agent (`int`): Position of the agent in the team.

        Returns:
            `list[float]` of length G.
        """
        by_completion = [[] for _ in range(1 + max(index[agent] for index in self.indices))]
        for index, value in zip(self.indices, self.returns, strict=True):
            by_completion[index[agent]].append(value)
        return [sum(values) / len(values) for values in by_completion]


def joint_action_indices(joint_mode: str, num_agents: int, num_generations: int) -> list[tuple[int, ...]]:
    """
    The joint actions of a node, as one completion index per agent.

    `"align"` pairs the g-th completions of all agents, G joint actions; `"cross"` takes the Cartesian product with the
    last agent fastest, G^N joint actions.
    """
    if joint_mode == "align":
        return [(g,) * num_agents for g in range(num_generations)]
    return list(itertools.product(range(num_generations), repeat=num_agents))


def grow_trees(
    items: list[dict],
    environment: Environment,
    sample: Callable[[list[Node], int], dict[str, list[Samples]]],
    score: Callable[[list[Node]], list[list[Outcome]]],
    *,
    num_turns: int,
    num_generations: int,
    joint_mode: str = "align",
    handoff: str | None = None,
    early_termination_threshold: float | None = None,
    discount: float = 1.0,
    process_reward: Callable[[float], float] = float,
) -> list[list[Node]]:
    """
    Plays one batch: a rollout tree, or a chain with `handoff`, for every item.

    Args:
        items (`list[dict]`):
            Dataset rows, one tree each.
        environment ([`Environment`]):
            Gives the roles, and the prompts of a whole turn at once.
        sample (`Callable`):
            `(nodes, num_generations) -> samples` of each role at each node. It is called once per turn with all nodes of the
            turn, even when early termination left none.
        score (`Callable`):
            `nodes -> outcomes` of each node's joint actions, called once per turn.
        num_turns, num_generations, joint_mode, handoff, early_termination_threshold, discount:
            See [`MAGRPOConfig`].
        process_reward (`Callable[[float], float]`, *optional*):
            Applied to every reward before anything looks at it.

    Returns:
        `list[list[Node]]`: The nodes of each turn, with their returns.
    """
    indices = joint_action_indices(joint_mode, len(environment.roles), num_generations)
    roots = ask(environment, items, [()] * len(items))
    nodes = [Node(item, (), prompts) for item, prompts in zip(items, roots, strict=True)]
    levels = []
    for turn in range(num_turns):
        levels.append(nodes)
        samples = sample(nodes, num_generations)
        for k, node in enumerate(nodes):
            node.samples = {role: samples[role][k] for role in environment.roles}
            node.indices = indices
        for node, outcomes in zip(nodes, score(nodes), strict=True):
            node.outcomes = outcomes
            node.rewards = [process_reward(outcome.reward) for outcome in outcomes]
        if turn + 1 < num_turns:
            nodes = _next_level(nodes, environment, handoff, early_termination_threshold)
    for nodes in reversed(levels):
        for node in nodes:
            node.returns = _returns(node, 0.0 if handoff else discount)
    return levels


def judge_nodes(environment: Environment, nodes: list[Node], evaluation: bool = False) -> list[list[Outcome]]:
    """
    The environment's outcomes of all joint actions of some nodes, in one call, for training or for an evaluation.

    Raises:
        TaskError: see [`~environments.base.judge`]. Its `position` counts the joint actions of all nodes.
    """
    if not nodes:
        return []
    owners = [node for node in nodes for _ in node.indices]
    joint_actions = [joint_action for node in nodes for joint_action in node.joint_actions]
    items, histories = [node.item for node in owners], [node.history for node in owners]
    outcomes = iter(judge(environment, items, joint_actions, histories, evaluation))
    return [[next(outcomes) for _ in node.indices] for node in nodes]


def _next_level(
    nodes: list[Node], environment: Environment, handoff: str | None, threshold: float | None
) -> list[Node]:
    """The nodes that the nodes of a turn open, with the prompts of all of them asked for in one call."""
    opened = [(node, joint_action) for node in nodes for joint_action in _handed_on(node, handoff, threshold)]
    if not opened:
        return []
    histories = [(*node.history, node.turn(joint_action)) for node, joint_action in opened]
    prompts = ask(environment, [node.item for node, _ in opened], histories)
    children = []
    for (node, joint_action), history, asked in zip(opened, histories, prompts, strict=True):
        node.children[joint_action] = Node(node.item, history, asked)
        children.append(node.children[joint_action])
    return children


def _handed_on(node: Node, handoff: str | None, threshold: float | None) -> Sequence[int]:
    """The joint actions of a node that open a node of the next turn."""
    if threshold is not None and sum(node.rewards) / len(node.rewards) > threshold:
        node.ended_early = True
        return []
    if handoff is None:
        return range(len(node.indices))
    if handoff == "best":
        return [max(range(len(node.rewards)), key=node.rewards.__getitem__)]  # the first of equals
    return [random.randrange(len(node.indices))]


def _returns(node: Node, discount: float) -> list[float]:
    """R_j = r_j + discount * the mean of the returns of the child that joint action j opened."""
    returns = list(node.rewards)
    for joint_action, child in node.children.items():
        returns[joint_action] += discount * sum(child.returns) / len(child.returns)
    return returns

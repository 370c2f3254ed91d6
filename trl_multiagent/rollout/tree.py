"""
Rollout trees: nodes, joint actions and returns, as plain data.

All trees of a batch grow together, turn by turn. Each level needs one call for its prompts, one for its completions
and one for its outcomes.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trl_multiagent.environments.base import Environment, JointAction, Outcome, Prompt, Turn, ask, judge
from trl_multiagent.environments.scoring import ScoringContext, scoring


if TYPE_CHECKING:
    from transformers import TrainerState


@dataclass
class Samples:
    """The G completions that one agent sampled at one node."""

    prompt_ids: list[int]  # token ids of the whole prompt, including the history
    completion_ids: list[list[int]]  # token ids of each completion, up to and including its end-of-sequence token
    texts: list[str]  # the completions as text
    logps: list[list[float]] | None = None  # of each token, in nats, if an inference engine and not the policy sampled
    prompt: Prompt | None = None  # the whole prompt, including the history, as text or chat messages
    dropped_turns: int | None = None  # past turns that the limit of the prompt's length left out; `None` without one


@dataclass
class Node:
    """One item with one history, from which every agent samples G completions. Lists have an entry per joint action."""

    item: dict  # the dataset row
    history: tuple[Turn, ...]  # the past turns of the branch, oldest first
    prompts: dict[str, Prompt]  # the new prompt of each agent
    samples: dict[str, Samples] = field(default_factory=dict)  # the completions of each agent
    indices: list[tuple[int, ...]] = field(default_factory=list)  # the index of each agent's completion
    outcomes: list[Outcome] = field(default_factory=list)  # of the environment
    rewards: list[float] = field(default_factory=list)  # after scale and shift
    children: dict[int, "Node"] = field(default_factory=dict)  # by the joint action that is continued; empty at a leaf
    returns: list[float] = field(default_factory=list)
    ended_early: bool = False  # whether early termination made this node a leaf
    # In a chain whose trainer has critics: the nodes that would follow the joint actions that are not continued. They have no samples
    unvisited: dict[int, "Node"] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)  # by critic, see `rollout.values`
    targets: dict[str, list[float]] = field(default_factory=dict)  # of these values, by critic
    # What each agent sampled at the node before, and the index of its completion in the joint action that led here; empty at a root
    continues: dict[str, tuple[Samples, int]] = field(default_factory=dict, repr=False)

    @property
    def next_nodes(self) -> dict[int, "Node"]:
        """The node that follows each joint action after which the episode goes on, visited or not."""
        return {**self.children, **self.unvisited}

    @property
    def joint_actions(self) -> list[JointAction]:
        """The joint actions: the text of each agent, by role."""
        return [
            {role: samples.texts[g] for (role, samples), g in zip(self.samples.items(), index, strict=True)}
            for index in self.indices
        ]

    def turn(self, joint_action: int) -> Turn:
        """Returns this node and one of its joint actions as a past turn, for the history of the child node."""
        return Turn(self.prompts, self.joint_actions[joint_action], self.outcomes[joint_action])

    def agent_returns(self, agent: int) -> list[float]:
        """Computes the return of each completion of the agent at this position: the mean over the joint actions that contain it."""
        by_completion: list[list[float]] = [[] for _ in range(1 + max(index[agent] for index in self.indices))]
        for index, value in zip(self.indices, self.returns, strict=True):
            by_completion[index[agent]].append(value)
        return [sum(values) / len(values) for values in by_completion]


def joint_action_indices(joint_mode: str, num_agents: int, num_generations: int) -> list[tuple[int, ...]]:
    """
    Returns the joint actions of a node, each as a tuple with the index of each agent's completion.

    `"align"` pairs the g-th completions of all agents (G joint actions). `"cross"` takes the Cartesian product, in
    which the index of the last agent varies fastest (G^N joint actions).
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
    with_unvisited: bool = False,
) -> list[list[Node]]:
    """
    Grows a rollout tree for each item; with `handoff`, a chain.

    Args:
        items (`list[dict]`): Dataset rows, one per tree.
        environment ([`Environment`]): Provides the roles and the prompts.
        sample (`Callable`):
            `(nodes, num_generations) -> {role: samples}`, with one entry of samples per node. Called once per turn
            with all nodes of the turn, even if early termination left none.
        score (`Callable`): `nodes -> outcomes` of each node's joint actions. Called once per turn.
        num_turns, num_generations, joint_mode, handoff, early_termination_threshold, discount: See [`RolloutConfig`].
        process_reward (`Callable[[float], float]`, *optional*): Applied to each reward. By default, rewards are left as they are.
        with_unvisited (`bool`, *optional*, defaults to `False`):
            Whether the environment also makes the next prompts of the joint actions that a chain does not continue. A critic
            needs them, because their targets contain its value of what follows.

    Returns:
        `list[list[Node]]`: The nodes of each turn, with their returns.
    """
    indices = joint_action_indices(joint_mode, len(environment.roles), num_generations)
    nodes = root_nodes(items, environment)
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
            nodes = _grow_children(nodes, environment, handoff, early_termination_threshold, with_unvisited)
    for nodes in reversed(levels):
        for node in nodes:
            node.returns = _returns(node, 0.0 if handoff else discount)  # in a chain, only the immediate reward
    return levels


def root_nodes(items: Sequence[dict], environment: Environment) -> list[Node]:
    """Makes the nodes of the first turn, one per item."""
    prompts = ask(environment, list(items), [()] * len(items))
    return [Node(item, (), of_item) for item, of_item in zip(items, prompts, strict=True)]


def judge_nodes(
    environment: Environment,
    nodes: list[Node],
    evaluation: bool = False,
    chat_roles: frozenset[str] = frozenset(),
    trainer_state: "TrainerState | None" = None,
    metrics: dict[str, list[float]] | None = None,
) -> list[list[Outcome]]:
    """
    Scores all joint actions of some nodes in one call of the environment, and returns the outcomes of each node.

    Args:
        environment ([`Environment`]): Scores the joint actions.
        nodes (`list[Node]`): Nodes with samples.
        evaluation (`bool`): Whether to call the environment's `evaluate` instead of its `score`.
        chat_roles, trainer_state, metrics: What reward functions may ask for, see [`~environments.scoring.ScoringContext`].

    Raises:
        TaskError: See [`~environments.base.judge`]. Its `position` counts the joint actions of all nodes.
    """
    if not nodes:
        return []
    owners = [node for node in nodes for _ in node.indices]
    joint_actions = [joint_action for node in nodes for joint_action in node.joint_actions]
    items = [node.item for node in owners]
    histories: list[Sequence[Turn]] = [node.history for node in owners]
    context = ScoringContext(
        prompts=[node.prompts for node in owners],
        completion_ids=[
            {role: samples.completion_ids[g] for (role, samples), g in zip(node.samples.items(), index, strict=True)}
            for node in nodes
            for index in node.indices
        ],
        chat_roles=chat_roles,
        trainer_state=trainer_state,
        metrics={} if metrics is None else metrics,
    )
    with scoring(context):
        outcomes = iter(judge(environment, items, joint_actions, histories, evaluation))
    return [[next(outcomes) for _ in node.indices] for node in nodes]


def _grow_children(
    nodes: list[Node],
    environment: Environment,
    handoff: str | None,
    threshold: float | None,
    with_unvisited: bool,
) -> list[Node]:
    """Adds the child nodes to the nodes of a turn, and returns those to visit."""
    asked = []  # node, joint action, whether it is continued
    for node in nodes:
        continued = _continued_actions(node, handoff, threshold)
        listed = range(len(node.indices)) if with_unvisited and not node.ended_early else continued
        asked += [(node, action, action in continued) for action in listed]
    if not asked:
        return []
    histories = [(*node.history, node.turn(action)) for node, action, _ in asked]
    prompts = ask(environment, [node.item for node, *_ in asked], [*histories])
    children = []
    for (node, action, is_continued), history, child_prompts in zip(asked, histories, prompts, strict=True):
        before = {role: (x, g) for (role, x), g in zip(node.samples.items(), node.indices[action], strict=True)}
        child = Node(node.item, history, child_prompts, continues=before)
        (node.children if is_continued else node.unvisited)[action] = child
        if is_continued:
            children.append(child)
    return children


def _continued_actions(node: Node, handoff: str | None, threshold: float | None) -> Sequence[int]:
    """Returns the indices of the joint actions that are continued in the next turn."""
    if threshold is not None and sum(node.rewards) / len(node.rewards) > threshold:
        node.ended_early = True
        return []
    if handoff is None:
        return range(len(node.indices))
    if handoff == "best":
        return [max(range(len(node.rewards)), key=node.rewards.__getitem__)]  # the first one if several are equal
    return [random.randrange(len(node.indices))]


def _returns(node: Node, discount: float) -> list[float]:
    """Computes R_j = r_j + discount * (mean of the returns of joint action j's child node); r_j without a child."""
    returns = list(node.rewards)
    for joint_action, child in node.children.items():
        returns[joint_action] += discount * sum(child.returns) / len(child.returns)
    return returns

"""
Rollout trees and groups of episodes: nodes, joint actions and returns, as plain data.

All trees of a batch grow together, turn by turn. Each turn needs one call for its prompts, one for its completions
and one for its outcomes. A group of episodes is several trees of the same item with one joint action per node.
"""

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from transformers import TrainerCallback

from trl_multiagent.environments.base import (
    Environment,
    History,
    JointAction,
    Outcome,
    Prompt,
    Prompts,
    Reply,
    ScoringContext,
    Turn,
    ask,
    judge,
    scoring,
)
from trl_multiagent.environments.task_errors import TaskError, as_rewards, function_name, task_code


Value = TypeVar("Value")


@dataclass
class Samples:
    """The G completions that one agent sampled at one node."""

    prompt_ids: list[int]  # token ids of the whole prompt, including the history
    completion_ids: list[list[int]]  # token ids of each completion, up to and including its end-of-sequence token
    texts: list[str]  # the completions as text, with their reasoning
    logps: list[list[float]] | None = None  # log-probabilities with which the tokens were sampled, in nats
    prompt: Prompt | None = None  # the whole prompt, including the history, as text or chat messages
    dropped_turns: int | None = None  # number of past turns that a limit of the length removed; `None` without a limit
    stop_strings: Sequence[str] = ()  # strings that end a completion, in addition to end-of-sequence tokens
    replies: list[Reply] | None = None  # the completions as everybody but their agent sees them; `None`: the texts

    def is_finished(self, g: int, end_tokens: Sequence[int]) -> bool:
        """Returns whether completion g ended before the limit of its length."""
        ended = any(token in end_tokens for token in self.completion_ids[g][-1:])
        return ended or any(string in self.texts[g] for string in self.stop_strings)

    def reply(self, g: int) -> Reply:
        """Returns completion g as everybody but its agent sees it."""
        return self.replies[g] if self.replies else Reply.of(self.texts[g])


@dataclass
class Node:
    """
    One item with one history, from which every agent that acts samples G completions. Lists have an entry per joint
    action. Rewards and returns are the team's; they are the means over the roles if each role has a reward of its own.
    """

    item: dict  # the dataset row
    history: tuple[Turn, ...]  # the past turns of the branch, oldest first
    prompts: Prompts  # the new prompt of each agent that acts, in the order of the roles
    samples: dict[str, Samples] = field(default_factory=dict)  # the completions of these agents
    indices: list[tuple[int, ...]] = field(default_factory=list)  # the index of each agent's completion
    outcomes: list[Outcome] = field(default_factory=list)  # outcomes from the environment
    rewards: list[float] = field(default_factory=list)  # after scale and shift
    children: dict[int, "Node"] = field(default_factory=dict)  # by the joint action that is continued; empty at a leaf
    returns: list[float] = field(default_factory=list)
    role_rewards: dict[str, list[float]] = field(default_factory=dict)  # rewards by role; empty if all roles share one
    role_returns: dict[str, list[float]] = field(default_factory=dict)  # returns by role; empty if all roles share one
    # Subtracted from an agent's returns, see `rollout.credit`. Empty without counterfactual credit
    counterfactuals: dict[str, list[float]] = field(default_factory=dict)
    tree: int = 0  # the number of the item, by default in its batch
    path: tuple[int, ...] = ()  # the joint actions that led here
    episode: int | None = None  # the number of the episode among its item's; `None` in a tree
    ended_early: bool = False  # whether early termination made this node a leaf
    ended: list[int] = field(default_factory=list)  # the joint actions after which the environment ended the episode
    values: dict[str, list[float]] = field(default_factory=dict)  # by critic, see `trainers.base.actor_critic_trainer`
    targets: dict[str, list[float]] = field(default_factory=dict)  # learning targets of these values, by critic
    # Each agent's last samples in this branch, and the index of its completion there; empty at a root
    continues: dict[str, tuple[Samples, int]] = field(default_factory=dict, repr=False)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that act at this node."""
        return tuple(self.prompts)

    @property
    def last_actions(self) -> Sequence[int]:
        """The joint actions with which an episode ends."""
        return self.ended if self.children else range(len(self.indices))

    @property
    def joint_actions(self) -> list[JointAction]:
        """The joint actions: the text of each agent that acts, by role."""
        return [self.texts(index) for index in self.indices]

    def texts(self, index: tuple[int, ...]) -> JointAction:
        """Returns the joint action with these completions."""
        return {role: samples.reply(g) for role, (samples, g) in self.chosen(index).items()}

    def completions(self, index: tuple[int, ...]) -> dict[str, str]:
        """Returns the whole completions of a joint action by role, with their reasoning."""
        return {role: samples.texts[g] for role, (samples, g) in self.chosen(index).items()}

    def chosen(self, index: tuple[int, ...]) -> dict[str, tuple[Samples, int]]:
        """Returns the completions of a joint action by role: the samples, and the number of the completion there."""
        return {role: (samples, g) for (role, samples), g in zip(self.samples.items(), index, strict=True)}

    def turn(self, joint_action: int) -> Turn:
        """Returns this node and one of its joint actions as a past turn, for the history of the child node."""
        return Turn(self.prompts, self.texts(self.indices[joint_action]), self.outcomes[joint_action])

    def rewards_of(self, role: str | None) -> list[float]:
        """Returns the rewards of a role: its own if it has some, else the team's. The role `None` is the team."""
        return self.rewards if role is None else self.role_rewards.get(role, self.rewards)

    def returns_of(self, role: str | None) -> list[float]:
        """Returns the returns of a role: its own if it has some, else the team's. The role `None` is the team."""
        return self.returns if role is None else self.role_returns.get(role, self.returns)

    def completion_of(self, role: str) -> list[int]:
        """Returns the index of a role's completion in each joint action."""
        agent = self.roles.index(role)
        return [index[agent] for index in self.indices]

    def agent_returns(self, role: str) -> list[float]:
        """
        Computes the return of each completion of an agent: the mean over the joint actions that contain it, of the
        role's return minus its counterfactual reward if there is one.
        """
        completions, returns = self.completion_of(role), self.returns_of(role)
        if role in self.counterfactuals:
            returns = [value - other for value, other in zip(returns, self.counterfactuals[role], strict=True)]
        by_completion = grouped(zip(completions, returns, strict=True))
        return [mean_of_known(by_completion[completion]) for completion in sorted(by_completion)]


Trees = list[list[Node]]  # the nodes of each turn of a batch of trees
ByRole = dict[str, list[Samples]]  # of each role, the samples at each node
# Samples completions at nodes, a number for each role that acts there
Sample = Callable[[list[Node], int], ByRole]
Score = Callable[[list[Node]], list[list[Outcome]]]  # of each node's joint actions


def known(values: Sequence[float]) -> list[float]:
    """Returns the rewards or returns that are not NaN. A joint action that nothing scores has NaN."""
    return [value for value in values if not math.isnan(value)]


def mean_of_known(values: Sequence[float]) -> float:
    """Returns the mean of the rewards or returns that are not NaN; NaN if there are none."""
    numbers = known(values)
    return sum(numbers) / len(numbers) if numbers else math.nan


def acting(role: str, nodes: Sequence[Node]) -> list[Node]:
    """Returns the nodes at which a role acts."""
    return [node for node in nodes if role in node.prompts]


def grouped(pairs: Iterable[tuple[Any, Value]]) -> dict[Any, list[Value]]:
    """Returns the values of each key, in their order."""
    groups: dict[Any, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def groups_of(nodes: Sequence[Node]) -> list[list[Node]]:
    """
    Divides the nodes of a turn into groups. Completions are compared within a group. In a tree, a group is one node;
    in episodes, it is the nodes of all episodes of the item.
    """
    return [*grouped((k if node.episode is None else node.tree, node) for k, node in enumerate(nodes)).values()]


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
    sample: Sample,
    score: Score,
    *,
    num_turns: int,
    num_generations: int,
    joint_mode: str = "align",
    handoff: str | None = None,
    early_termination_threshold: float | None = None,
    discount: float = 1.0,
    process_reward: Callable[[float], float] = float,
    num_episodes: int | None = None,
    numbers: Sequence[int] | None = None,
    seed: int | str = 0,
) -> Trees:
    """
    Grows a rollout tree for each item; with `handoff`, a chain; with `num_episodes`, a group of episodes.

    Args:
        items (`list[dict]`): Dataset rows, one per tree.
        environment ([`Environment`]): Provides the roles and the prompts.
        sample (`Callable`): `(nodes, num_generations) -> {role: samples}`, with one entry of samples per node at which
            the role acts. Called once per turn with all nodes of the turn, even if there are none.
        score (`Callable`): `nodes -> outcomes` of each node's joint actions. Called once per turn.
        num_turns, num_generations, joint_mode, handoff, early_termination_threshold, discount: See [`RolloutConfig`].
        process_reward (`Callable[[float], float]`, *optional*): Applied to each reward. By default, rewards are left
            as they are.
        num_episodes (`int`, *optional*): Number of independent episodes of each item. Episode e of item i is entry
            `i * num_episodes + e` of the first turn. `num_generations` is 1 then.
        numbers (`Sequence[int]`, *optional*): The `tree` of each item's nodes, on which draws depend. By default, its
            position.
        seed (`int` or `str`, *optional*, defaults to `0`): Seed of the joint actions that the handoff `"random"`
            draws.

    Returns:
        `list[list[Node]]`: The nodes of each turn, with their returns.
    """
    turns = []
    with environment.playing(num_turns, are_episodes=num_episodes is not None):
        nodes = root_nodes(items, environment, num_episodes, numbers)
        for turn in range(num_turns):
            turns.append(nodes)
            for role, samples in sample(nodes, num_generations).items():
                for node, node_samples in zip(acting(role, nodes), samples, strict=True):
                    node.samples[role] = node_samples
            for node in nodes:
                node.samples = {role: node.samples[role] for role in node.roles}
                node.indices = joint_action_indices(joint_mode, len(node.roles), num_generations)
            for node, outcomes in zip(nodes, score(nodes), strict=True):
                _add_outcomes(node, outcomes, environment.roles, process_reward)
            if turn + 1 < num_turns:
                choices = (handoff, early_termination_threshold, seed)
                asked = [(node, action) for node in nodes for action in _continued_actions(node, *choices)]
                nodes = _grow_children(asked, environment)
    _add_group_rewards(turns, environment, process_reward)
    _add_returns(turns, environment.roles, 0.0 if handoff else discount)  # in a chain, only the immediate reward
    return turns


def play_episodes(
    items: list[dict],
    environment: Environment,
    sample: Sample,
    score: Score | None = None,
    *,
    num_turns: int | None = None,
    num_episodes: int = 1,
    **settings: Any,
) -> Trees:
    """
    Plays a batch of episodes, turn by turn.

    Args:
        items, environment, sample, settings: See [`grow_trees`].
        score (`Callable`, *optional*): `nodes -> outcomes` of each node's joint action. Called once per turn. By
            default, the environment's `evaluate`.
        num_turns (`int`, *optional*): Largest number of turns; by default the environment's, see
            [`~Environment.check_turns`].
        num_episodes (`int`, *optional*, defaults to `1`): Number of episodes per item.

    Returns:
        `list[list[Node]]`: The nodes of each turn, each with one joint action. Episode e of item i is entry
        `i * num_episodes + e` of the first turn; episodes that the environment has ended are missing in later turns.

    Raises:
        ValueError: `num_turns` or `num_episodes` is not a positive whole number.
    """
    for name, value in (("num_turns", num_turns), ("num_episodes", num_episodes)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"`{name}` is {value!r}; it must be a whole number of at least 1.")
    return grow_trees(
        items,
        environment,
        sample,
        score or (lambda nodes: judge_nodes(environment, nodes, evaluation=True)),
        num_turns=environment.check_turns(None) if num_turns is None else num_turns,
        num_generations=1,
        num_episodes=num_episodes,
        **settings,
    )


def nodes_of_episode(root: Node) -> list[Node]:
    """Returns the nodes of an episode that [`play_episodes`] played, in order."""
    nodes = [root]
    while nodes[-1].children:
        nodes.append(nodes[-1].children[0])
    return nodes


def turns_of_episodes(turns: Trees) -> list[list[Turn]]:
    """Returns the turns of each episode that [`play_episodes`] played."""
    return [[node.turn(0) for node in nodes_of_episode(root)] for root in turns[0]]


def derive_seed(*parts: Any) -> int:
    """Returns a seed of 32 bits that depends on all parts."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")


def root_nodes(
    items: Sequence[dict],
    environment: Environment,
    num_episodes: int | None = None,
    numbers: Sequence[int] | None = None,
) -> list[Node]:
    """Makes the nodes of the first turn: one per item, or one per episode. For the arguments, see [`grow_trees`]."""
    nodes = [
        Node(dict(item), (), {}, tree=number, episode=episode)
        for number, item in zip(numbers or range(len(items)), items, strict=True)
        for episode in ([None] if num_episodes is None else range(num_episodes))
    ]
    prompts = ask(environment, [node.item for node in nodes], [()] * len(nodes))
    for node, node_prompts in zip(nodes, prompts, strict=True):
        node.prompts = node_prompts
    return nodes


def first_nodes(items: Sequence[dict], environment: Environment) -> list[Node]:
    """Makes the nodes of the first turn of episodes that end there, to look at their prompts."""
    with environment.playing(None, are_episodes=True):
        return root_nodes(items, environment)


def judge_nodes(
    environment: Environment,
    nodes: list[Node],
    evaluation: bool = False,
    **context: Any,
) -> list[list[Outcome]]:
    """
    Scores all joint actions of the nodes in one call of the environment, and returns the outcomes of each node.

    Args:
        environment ([`Environment`]): Scores the joint actions.
        nodes (`list[Node]`): Nodes with samples.
        evaluation (`bool`): Whether to call the environment's `evaluate` instead of its `score`.
        **context: Fields of the [`~environments.base.ScoringContext`], such as `chat_roles`.

    Raises:
        TaskError: See [`~environments.base.judge`]. Its `position` counts the joint actions of all nodes.
    """
    if not nodes:
        return []
    places = [(node, index) for node in nodes for index in node.indices]
    items, histories = [node.item for node, _ in places], [node.history for node, _ in places]
    joint_actions = [node.texts(index) for node, index in places]
    ids = [{role: x.completion_ids[g] for role, (x, g) in node.chosen(index).items()} for node, index in places]
    prompts, trees = [node.prompts for node, _ in places], [node.tree for node, _ in places]
    with scoring(ScoringContext(prompts, ids, trees=trees, **context)):
        outcomes = iter(judge(environment, items, joint_actions, [*histories], evaluation))
    return [[next(outcomes) for _ in node.indices] for node in nodes]


def _add_outcomes(
    node: Node, outcomes: list[Outcome], roles: Sequence[str], process_reward: Callable[[float], float]
) -> None:
    """Stores the outcomes of a node's joint actions, and their rewards, also by role if each role has its own."""
    node.outcomes = outcomes
    node.rewards = [process_reward(outcome.reward) for outcome in outcomes]
    if any(outcome.role_rewards for outcome in outcomes):
        node.role_rewards = {
            role: [process_reward(x.role_rewards.get(role, x.reward)) for x in outcomes] for role in roles
        }


def _add_group_rewards(turns: Trees, environment: Environment, process_reward: Callable[[float], float]) -> None:
    """Adds the rewards that compare the finished branches of an item to the last reward of each branch."""
    name = f"The group reward of `{function_name(environment.unwrapped)}`"
    finished = grouped(
        (node.tree, (node, action)) for nodes in turns for node in nodes for action in node.last_actions
    )
    for branches in finished.values():
        histories: list[History] = [(*node.history, node.turn(action)) for node, action in branches]
        with task_code(name):
            added = environment.group_rewards(branches[0][0].item, histories)
        if added is None:
            continue
        for (node, action), number in zip(branches, as_rewards(name, added, len(branches)), strict=True):
            if isinstance(number, dict):
                raise TaskError(f"{name} returned rewards by role; it must return a number for each episode.")
            outcome, number = node.outcomes[action], number or 0.0
            roles = {role: x + number for role, x in outcome.role_rewards.items()}
            node.outcomes[action] = replace(outcome, reward=outcome.reward + number, role_rewards=roles)
            _add_outcomes(node, node.outcomes, environment.roles, process_reward)


def _grow_children(asked: list[tuple[Node, int]], environment: Environment) -> list[Node]:
    """Adds child nodes to nodes of a turn, each after a joint action, and returns them."""
    if not asked:
        return []
    histories = [(*node.history, node.turn(action)) for node, action in asked]
    prompts = ask(environment, [node.item for node, _ in asked], [*histories])
    children = []
    for (node, action), history, child_prompts in zip(asked, histories, prompts, strict=True):
        if not child_prompts:
            node.ended.append(action)
            continue
        node.children[action] = child = Node(
            node.item,
            history,
            child_prompts,
            tree=node.tree,
            episode=node.episode,
            path=(*node.path, action),
            continues={**node.continues, **node.chosen(node.indices[action])},
        )
        children.append(child)
    return children


def _continued_actions(node: Node, handoff: str | None, threshold: float | None, seed: int | str) -> Sequence[int]:
    """Returns the indices of the joint actions that are continued in the next turn."""
    if threshold is not None and mean_of_known(node.rewards) > threshold:
        node.ended_early = True
        return []
    if handoff is None:
        return range(len(node.indices))
    if handoff == "best":
        ranks = [-math.inf if math.isnan(reward) else reward for reward in node.rewards]
        return [ranks.index(max(ranks))]  # the first one if several are equal
    # The draw depends on the item and the turn, so it is the same for any number of processes
    return [random.Random(f"{seed}/{node.tree}/{len(node.history)}").randrange(len(node.indices))]


def _add_returns(turns: Trees, roles: Sequence[str], discount: float) -> None:
    """Computes the returns of all nodes, also by role if a node has rewards by role."""
    nodes = [node for nodes in reversed(turns) for node in nodes]
    has_roles = any(node.role_rewards for node in nodes)
    for node in nodes:
        for role in (None, *roles) if has_roles else (None,):  # `None` is the team
            returns = list(node.rewards_of(role))  # R_j = r_j + discount * mean return of joint action j's child node
            for joint_action, child in node.children.items() if discount else ():  # 0 * NaN is NaN
                returns[joint_action] += discount * mean_of_known(child.returns_of(role))
            if role is None:
                node.returns = returns
            else:
                node.role_returns[role] = returns


class RolloutCallback(TrainerCallback):
    """A callback of a trainer that learns from rollout trees, which reads the trees of its process."""

    def on_rollout(self, args: Any, state: Any, split: str, turns: Trees, rows: Callable[[], list[dict]]) -> None:
        """
        Reads a batch of trees, in training or in an evaluation. `rows` makes their rows when it is first called, see
        [`rollout.trace`]; `split` is a column of them.
        """

    def on_checkpoint(self) -> None:
        """Writes what it has read, before a checkpoint is complete. A run that resumes there does not repeat it."""

    def on_exit(self, args: Any) -> None:
        """Writes what is left to write, when a training ends, also by a signal or an error."""

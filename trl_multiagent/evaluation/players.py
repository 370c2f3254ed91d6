"""
What an evaluation plays beside a team: baselines, teams that do not read their messages, and teams of agents from
several teams.

Baselines are an untrained model alone or as a team, on the same items as the trained team. `raw_single_agent`: one
agent gets the whole task. `concatenation`: the agents answer independently, and the environment joins their answers.
`pipeline`: they answer one after the other, and each sees the answers before its own.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from trl_multiagent.environments.base import Environment, History, JointAction, Outcome, Prompts, ask
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.environments.wrapper import EnvironmentWrapper
from trl_multiagent.models.grouped_lora import Stacked
from trl_multiagent.rollout.sampler import SamplingTeam, TeamSampler
from trl_multiagent.rollout.tree import ByRole, Node, acting, grouped


CUT, SHUFFLED = "cut", "shuffled"


@dataclass
class LoadedTeam:
    """A team that can sample, and its description, which must be the same when an evaluation is resumed."""

    team: SamplingTeam
    description: dict[str, Any]


@dataclass
class Policy:
    """A team plus the environment that it plays."""

    name: str  # in tables, and of the folder of its transcripts
    kind: str  # "team", "baseline", "control", "ablation", or "pair": agents of several runs in a cross-play
    environment: Environment  # its task, with the roles of the team
    load: Callable[[], LoadedTeam]  # loads the team, on its device
    max_completion_length: int  # in tokens
    source: str = ""  # where the team comes from
    is_pipeline: bool = False  # whether the agents answer one after the other
    compared_with: str = ""  # name of the team that a control or an ablation belongs to; by default all teams
    row: str = ""  # name in the comparison with teams; by default the name of the baseline
    is_shown: bool = True  # in the main table
    silent_role: str | None = None  # an agent with empty answers
    mix: tuple[int, ...] = ()  # in a cross-play, the number of the run from which each role's agent comes


class PipelineSampler(TeamSampler):
    """
    Samples the agents one after the other. `environment.show_answers` adds the earlier agents' answers to an agent's
    prompt. The prompts of the nodes are replaced by these longer ones.
    """

    def __init__(self, environment: Environment, *args: Any):
        super().__init__(*args)
        self.environment = environment

    def __call__(self, nodes: list[Node], num_generations: int) -> ByRole:
        samples: ByRole = {}
        for role in self.team.roles:
            own = acting(role, nodes)
            for node in own if samples else ():
                answers = {other: x.reply(0) for other, x in node.samples.items()}
                shown = self.environment.show_answers(role, node.prompts[role], answers)
                node.prompts = {**node.prompts, role: shown}
            samples |= self.sample((role,), nodes, num_generations)
            for node, node_samples in zip(own, samples[role], strict=True):
                node.samples[role] = node_samples
        return samples


class MessageAblation(EnvironmentWrapper):
    """
    An environment that replaces the answers of an agent's partners before it makes the agent's prompt. The agent's own
    answers, all scores and the outcomes of past turns stay. It has no effect around a
    [`~rollout.seats.SeatedEnvironment`]: wrap the task inside instead.

    Args:
        task ([`Environment`]): The task.
        how (`str`): The replacement: `"cut"` for empty answers, `"shuffled"` for the answers to another item that is
            played at the same time, always the same one.
    """

    def __init__(self, task: Environment, how: str):
        super().__init__(task)
        self.how = how
        self.seen: dict[str, list[Any]] = {}

    def resume_settings(self) -> dict[str, Any]:
        return {**super().resume_settings(), "messages": self.how}

    def playing(
        self, num_turns: int | None, are_episodes: bool, seats: Collection[str] = ()
    ) -> AbstractContextManager[None]:
        return super().playing(num_turns, False, seats)  # a workflow is replayed from the answers that are read

    def judge(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[History], evaluation: bool
    ) -> list[Outcome]:
        true = [[replace(turn, altered=True) for turn in history] for history in histories]
        return super().judge(items, joint_actions, [*true], evaluation)

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[Prompts]:
        branches = [*zip(items, histories, strict=True)]
        now = grouped((key_of(branch[0]), branch) for branch in branches)
        if not any(histories):
            self.seen = now
            return ask(self.task, items, histories)
        self.seen |= now  # also items whose episodes have ended
        branches += [branch for key, others in self.seen.items() if key not in now for branch in others]
        # Cut messages have no source: each branch is its own partner
        partners = partners_of([item for item, _ in branches]) if self.how == SHUFFLED else range(len(branches))
        sources = [[branches[other][1] for other in ring_of(partners, k)] for k in range(len(items))]
        prompts: list[Prompts] = [{} for _ in items]
        for role in self.roles:
            read = [with_answers_of(*pair, role) for pair in zip(histories, sources, strict=True)]
            for item_prompts, asked in zip(prompts, ask(self.task, items, read), strict=True):
                if role in asked:
                    item_prompts[role] = asked[role]
        return prompts


def with_answers_of(history: History, sources: Sequence[History], role: str) -> History:
    """
    Returns the history that an agent reads. It has the other agents' answers in the first of the `sources` that has
    the turn, or empty ones without any.
    """
    turns = []
    for number, turn in enumerate(history):
        answers = next((source[number].joint_action for source in sources if number < len(source)), {})
        read = {name: text if name == role else answers.get(name, "") for name, text in turn.joint_action.items()}
        turns.append(replace(turn, joint_action=read, altered=True))
    return turns


def key_of(item: dict) -> str:
    """Returns a text that differs between items."""
    return json.dumps(item, sort_keys=True, default=str)


def partners_of(items: list[dict]) -> list[int]:
    """
    Returns, for each branch, the position of a branch of another item. The pairs of items depend on the items alone.
    Raises [`TaskError`] if there is only one item.
    """
    branches = grouped((key_of(item), k) for k, item in enumerate(items))
    if len(branches) < 2:
        raise TaskError("Messages can only be exchanged between different items: play at least two of them at a time.")
    # The hash is cryptographic, because items with neighbouring checksums are alike
    order = sorted(branches, key=lambda key: hashlib.sha256(key.encode()).digest())
    partners = [0] * len(items)
    for key, following in zip(order, [*order[1:], order[0]], strict=True):
        for number, position in enumerate(branches[key]):
            partners[position] = branches[following][number % len(branches[following])]
    return partners


def ring_of(partners: Sequence[int], start: int) -> Iterator[int]:
    """Yields a branch's partner, its partner's partner, and so on, until this is a branch again that was one."""
    seen, branch = {start}, partners[start]
    while branch not in seen:
        yield branch
        seen.add(branch)
        branch = partners[branch]


class MixedTeam:
    """
    A team of agents from several teams, `sources`, by role. It can sample, but it cannot be trained or saved.
    """

    def __init__(self, sources: Mapping[str, SamplingTeam]):
        self.sources = dict(sources)
        self.roles = tuple(sources)
        self.joinable: dict[str, str] = {}
        teams = sources.items()
        self.agents = {role: team.agents[role] for role, team in teams}
        self.tokenizers = {role: team.tokenizers[role] for role, team in teams}
        self.reasoning = {role: team.reasoning[role] for role, team in teams}
        self.chat_template_kwargs = {role: team.chat_template_kwargs[role] for role, team in teams}

    def together(self, roles: Sequence[str]) -> AbstractContextManager[tuple[PreTrainedModel, Stacked | None]]:
        return self.sources[roles[0]].together(roles)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with ExitStack() as stack:
            for team in dict.fromkeys(self.sources.values()):
                stack.enter_context(team.evaluating())
            yield

    def end_tokens(self, role: str) -> list[int]:
        return self.sources[role].end_tokens(role)

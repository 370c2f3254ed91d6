"""What is evaluated: policies, each a team in an environment, and the samplers with which they answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from trl_multiagent.environments.base import Environment
from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.jobs.identity import checksum_of_weights, describe_agent
from trl_multiagent.models.chat_markers import marker_pattern, without_markers
from trl_multiagent.models.generation import generate_groups
from trl_multiagent.rollout.episodes import derive_seed
from trl_multiagent.rollout.sampler import (
    Completions,
    Level,
    SamplingTeam,
    TeamSampler,
    TransformersGenerator,
    render_chat,
)
from trl_multiagent.rollout.tree import Node, Samples
from trl_multiagent.team.agent_team import AgentTeam


class MixedTeam:
    """
    A team whose agents come from several teams. It can sample, but it cannot be trained or saved.

    Args:
        sources (`dict[str, SamplingTeam]`): The team from which each role's agent comes, in the order of the roles.
    """

    def __init__(self, sources: Mapping[str, SamplingTeam]):
        self.sources = dict(sources)
        self.roles = tuple(sources)
        self.tokenizers: dict[str, PreTrainedTokenizerBase] = {
            role: team.tokenizers[role] for role, team in sources.items()
        }

    def activate(self, role: str) -> AbstractContextManager[PreTrainedModel]:
        return self.sources[role].activate(role)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for team in {id(team): team for team in self.sources.values()}.values():
                stack.enter_context(team.evaluating())
            yield

    def end_tokens(self, role: str) -> list[int]:
        return self.sources[role].end_tokens(role)


class EpisodeGenerator(TransformersGenerator):
    """
    Samples episodes. The random numbers of a completion depend on the seed, the item, the episode, the turn and the role
    alone, so neither the other episodes of a batch nor the number of processes changes it, up to rounding.

    Args:
        team ([`AgentTeam`] or [`MixedTeam`]): The agents.
        arguments, token_budget: See [`TransformersGenerator`].
        seed (`int`): Random seed.
    """

    def __init__(self, team: SamplingTeam, arguments: dict[str, Any], token_budget: int | None, seed: int):
        super().__init__(team, arguments, token_budget)
        self.seed = seed
        self.silent_role: str | None = None  # an agent whose answers are empty
        self.episodes: list[tuple[int, int]] = []  # item and episode of each node of the turn
        self.generation_seconds: list[dict[str, float]] = []  # of each role's generate call, for every turn

    def generate(self, level: Level) -> dict[str, list[Completions]]:
        if len(level.nodes[0].history) == len(self.generation_seconds):  # the first call of a turn
            self.generation_seconds.append({})
        return super().generate(level)

    def sample(
        self, agent: PreTrainedModel, role: str, prompt_ids: list[list[int]], level: Level, config: GenerationConfig
    ) -> list[list[list[int]]]:
        """Samples one completion per node. The episodes of an item that have the same prompt read it once."""
        nodes = level.nodes
        if role == self.silent_role:
            self.generation_seconds[-1][role] = 0.0
            return [[self.team.end_tokens(role)[:1]] for _ in nodes]
        seeds = [
            derive_seed(self.seed, item, episode, len(node.history), role)
            for (item, episode), node in zip(self.episodes, nodes, strict=True)
        ]
        same: dict[tuple[int, ...], list[int]] = {}  # the nodes of each prompt
        for k, ids in enumerate(prompt_ids):
            same.setdefault(tuple(ids), []).append(k)
        rows = list(same.values())
        if len({len(nodes_of_prompt) for nodes_of_prompt in rows}) > 1:
            rows = [[k] for k in range(len(nodes))]
        start = time.perf_counter()
        groups = generate_groups(
            agent,
            [prompt_ids[of_prompt[0]] for of_prompt in rows],
            len(rows[0]),
            config,
            self.token_budget,
            [[seeds[k] for k in of_prompt] for of_prompt in rows],
        )
        self.generation_seconds[-1][role] = time.perf_counter() - start
        completions: list[list[list[int]]] = [[] for _ in nodes]
        for of_prompt, group in zip(rows, groups, strict=True):
            for k, ids in zip(of_prompt, group, strict=True):
                completions[k] = [ids]
        return completions


class PipelineSampler(TeamSampler):
    """
    The agents answer one after the other, and each sees the answers of the agents before it. The prompts of the nodes are
    replaced by those that the agents got.

    Args:
        environment ([`~trl_multiagent.environments.Environment`]): Its `show_answers` adds answers to prompts.
        team, generator, use_chat_template, history_options: See [`TeamSampler`].
    """

    def __init__(self, environment: Environment, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.environment = environment

    def __call__(self, nodes: list[Node], num_generations: int) -> dict[str, list[Samples]]:
        samples: dict[str, list[Samples]] = {}
        for role in self.team.roles:
            tokenizer = self.team.tokenizers[role]
            markers = marker_pattern(tokenizer, partial(render_chat, tokenizer)) if role in self.chat_roles else None
            for k, node in enumerate(nodes if samples else ()):
                answers = {other: samples[other][k].texts[0] for other in samples}
                if markers is not None:
                    answers = {other: without_markers(text, markers) for other, text in answers.items()}
                shown = self.environment.show_answers(role, node.prompts[role], answers)
                node.prompts = {**node.prompts, role: shown}
            samples |= self.sample((role,), nodes, num_generations)
        return samples


@dataclass
class LoadedTeam:
    """A team that can sample, and what must be the same when an evaluation with it is continued."""

    team: SamplingTeam
    description: dict[str, Any]


class Replaced(NamedTuple):
    """The agent of a team that an ablation replaces, and by what: `NOTHING`, `UNTRAINED` or `OTHER_TEAM`."""

    role: str
    by: str


NOTHING, UNTRAINED, OTHER_TEAM = "nothing", "the untrained agent", "another team's agent"


@dataclass
class Policy:
    """
    What answers the items: a team in its environment.

    Args:
        name (`str`): Name in tables and of the folder of its transcripts.
        kind (`str`): `"team"`, `"baseline"`, `"control"`, `"ablation"`, or `"pair"`: agents of several runs in a cross-play.
        environment ([`~trl_multiagent.environments.Environment`]): Its task, with roles that are those of the team.
        load (`Callable[[], LoadedTeam]`): Loads the team, on its device.
        max_completion_length (`int`): Tokens of a completion at most.
        source (`str`): Where the team comes from.
        is_pipeline (`bool`): Whether the agents answer one after the other.
        rounds (`int`): Turns of the environment in one turn of the task. The last one counts, and the others are drafts.
        compared_with (`str`): Name of the team that a control or an ablation belongs to.
        replaced ([`Replaced`], *optional*): What an ablation replaces.
    """

    name: str
    kind: str
    environment: Environment
    load: Callable[[], LoadedTeam]
    max_completion_length: int
    source: str = ""
    is_pipeline: bool = False
    rounds: int = 1
    compared_with: str = ""
    replaced: Replaced | None = None

    def num_turns(self, config: EvaluationConfig) -> int:
        """Turns of the environment in an episode, drafts included."""
        assert config.num_turns is not None
        return config.num_turns * self.rounds


def describe_team(team: AgentTeam) -> dict[str, Any]:
    """What identifies the agents of a team: architecture and checksum of the weights of each role, as plain values."""
    checksums: dict[int, str] = {}  # of each distinct model
    description = {}
    for role in team.roles:
        model = team.policies[role]
        if id(model) not in checksums:
            checksums[id(model)] = checksum_of_weights(model.parameters())
        description[f"agent {role}"] = f"{describe_agent(team.agents[role])}, weights {checksums[id(model)]}"
    return description


def mix(parts: Mapping[str, LoadedTeam]) -> LoadedTeam:
    """
    A team of agents that come from several teams.

    Args:
        parts (`dict[str, LoadedTeam]`): The team from which each role's agent comes, in the order of the roles.
    """
    names = {role: f"agent {role}" for role in parts}
    description = {names[role]: part.description[names[role]] for role, part in parts.items()}
    return LoadedTeam(MixedTeam({role: part.team for role, part in parts.items()}), description)

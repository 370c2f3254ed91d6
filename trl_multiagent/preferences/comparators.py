"""
Makes comparators, the policies that sample the other joint answer of a pair. They get the same nodes as the team that
is trained.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trl_multiagent.endpoints.client import EndpointClient
from trl_multiagent.endpoints.endpoint import describe_endpoint
from trl_multiagent.environments.base import Prompt
from trl_multiagent.environments.centralized import assignments, central_prompt, split_blocks
from trl_multiagent.folders import TEAM_FILE
from trl_multiagent.jobs.fingerprint import checksum_of_weights
from trl_multiagent.preferences.config import CANDIDATES_FOLDER, PreferenceConfig
from trl_multiagent.rollout.sampler import TeamSampler, TransformersGenerator, sampling_arguments
from trl_multiagent.rollout.seats import ask_endpoint
from trl_multiagent.rollout.tree import Node, Samples
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.team.load import load_player, one_line


ROUND_FOLDER = "round_{}"  # in `policy_checkpoint_dir`: the team before this round
ENDPOINT_FOLDER = "endpoint"  # in the folder of the candidates: the answers of an endpoint
SOLO = "model"  # the role of a model that answers for all roles

# `(nodes, num_candidates) -> {role: samples}`, with one entry of samples per node
Sampler = Callable[[list[Node], int], dict[str, list[Samples]]]


@dataclass
class Comparator:
    """The policy that sampled one side of the pairs."""

    name: str  # in the columns `chosen_by` and `rejected_by`
    team: AgentTeam | None  # the models that answer; `None` for an endpoint
    sample: Sampler
    client: EndpointClient | None = None  # asks the endpoint

    def describe(self) -> dict[str, Any]:
        """Returns the facts that must be the same when an interrupted collection is resumed."""
        facts: dict[str, Any] = {"comparator": self.name}
        if self.team is not None:
            facts["comparator weights"] = checksum_of_weights(self.team.parameters())
        if self.client is not None:
            facts["comparator endpoint"] = describe_endpoint(self.client.endpoint)
        return facts

    def numbers(self) -> dict[str, float]:
        """Returns the use of an endpoint by the whole collection, over all processes and restarts."""
        if self.client is None:
            return {}
        endpoint, ledger = self.client.endpoint, self.client.ledger
        ledger.update()
        numbers: dict[str, float] = {"comparator_answers": ledger.requests}
        numbers["comparator_input_tokens"] = ledger.input_tokens
        numbers["comparator_output_tokens"] = ledger.output_tokens
        if endpoint.has_price:
            numbers["comparator_cost"] = endpoint.cost(ledger.input_tokens, ledger.output_tokens)
        return numbers


def make_comparator(team: AgentTeam, config: PreferenceConfig, round: int = 0) -> Comparator | None:
    """
    Makes the comparator that `config.comparator_policy` names for a team that is trained, or `None` if there is none.
    `history` depends on the number of the `round`. Raises `ValueError` if a model or team cannot be loaded or has
    other roles, or there is no saved team.
    """
    policy, seed = config.comparator_policy, f"{config.seed}/{round}/comparator"
    if policy is None:
        return None
    if policy in ("model", "api"):
        return _other_model(team, config, round)
    name, other = "current", team
    if policy == "current_copy":
        name, other = policy, team.frozen_copy()
    elif policy == "history" and round > 0:
        folder = history_folder(config, round)
        name, other = f"history:{folder.name}", load(str(folder), team.roles, team)
    return Comparator(name, other, team_sampler(other, config, seed))


def _other_model(team: AgentTeam, config: PreferenceConfig, round: int) -> Comparator:
    """Makes the comparator of `comparator_policy: model` or `api`: a model for each role, or one for all roles."""
    roles, mode = team.roles, config.comparator_generation_mode
    other: AgentTeam | None = None
    client: EndpointClient | None = None
    if config.comparator_policy == "api":
        folder = Path(config.output_dir) / CANDIDATES_FOLDER / ENDPOINT_FOLDER
        client = EndpointClient(config.comparator_endpoint(len(roles)), folder)
        name = f"api:{client.endpoint.model}"
        sample: Sampler = partial(ask_model, client, team.tokenizers[roles[0]], f"{config.seed}/{round}")
    else:
        names = config.comparator_agents or config.comparator_model_name
        assert names is not None  # the configuration has checked it
        name = f"model:{names if isinstance(names, str) else ','.join(names)}"
        other = load(names, roles if mode == "decentralized" else [SOLO], team)
        answers = len(roles) if mode == "centralized" else 1  # in one text
        length = answers * config.max_completion_length
        sample = team_sampler(other, config, f"{config.seed}/{round}/comparator", length)
    if mode == "decentralized":
        return Comparator(name, other, sample, client)
    one_for_all = sample_centralized if mode == "centralized" else sample_sequentially
    return Comparator(f"{name}:{mode}", other, partial(one_for_all, sample, roles), client)


def history_folder(config: PreferenceConfig, round: int) -> Path:
    """
    Returns the folder of the team as it was `comparator_history_k` rounds ago, or at the start. Raises `ValueError`
    without a team.
    """
    assert config.policy_checkpoint_dir is not None  # the configuration has checked it
    folder = Path(config.policy_checkpoint_dir) / ROUND_FOLDER.format(max(0, round - config.comparator_history_k))
    if not (folder / TEAM_FILE).is_file():
        raise ValueError(f"`comparator_policy: history` needs an earlier team, but {folder} holds no team.")
    return folder


def load(names: str | Sequence[str], roles: Sequence[str], like: AgentTeam) -> AgentTeam:
    """Loads a team that is not trained, with the data type and on the device of another one."""
    names = names if isinstance(names, str) else list(names)
    with one_line(f"The comparator cannot be loaded from {names!r}"):
        team = load_player(names, roles)
    if team.roles != tuple(roles):
        raise ValueError(f"The comparator {names} has the roles {list(team.roles)}, the team {list(roles)}.")
    return team.requires_grad_(False).eval().to(device=like.device, dtype=like.dtype)


def team_sampler(team: AgentTeam, config: PreferenceConfig, seed: str, length: int | None = None) -> TeamSampler:
    """Makes the sampler of a team from the settings. `length` replaces `max_completion_length`."""
    settings = {**config.sampling_kwargs, "max_new_tokens": length or config.max_completion_length}
    generator = TransformersGenerator(team, sampling_arguments(settings), config.generation_token_budget, seed=seed)
    return TeamSampler(team, generator, config.use_chat_template)


def ask_model(
    client: EndpointClient, tokenizer: PreTrainedTokenizerBase, seed: str, nodes: list[Node], num_candidates: int
) -> dict[str, list[Samples]]:
    """
    Samples completions of a model at an endpoint. Each completion is a request of its own, and all of them are sent at
    the same time. For `seed` and missing answers, see [`~rollout.seats.ask_endpoint`].
    """
    prompts = [prompt for node in nodes for prompt in node.prompts.values() for _ in range(num_candidates)]
    texts = iter(ask_endpoint(client, prompts, seed, "The comparator"))
    samples: dict[str, list[Samples]] = {}
    for node in nodes:
        for role in node.prompts:
            answers = [next(texts) for _ in range(num_candidates)]
            samples.setdefault(role, []).append(Samples([], [tokenizer(x)["input_ids"] for x in answers], answers))
    return samples


def sample_centralized(
    sample: Sampler, roles: Sequence[str], nodes: list[Node], num_candidates: int
) -> dict[str, list[Samples]]:
    """
    Samples joint answers of one model, whose role is `SOLO`. It sees the assignments of all roles and answers with a
    tagged block for each, as in a [`~environments.centralized.CentralizedEnvironment`]. The answer of a role without a
    block, or with several, is empty.
    """
    asked = [Node(node.item, (), {SOLO: central_prompt(roles, node.prompts)}, tree=node.tree) for node in nodes]
    result: dict[str, list[Samples]] = {role: [] for role in roles}
    for samples in sample(asked, num_candidates)[SOLO]:
        answers = [split_blocks(text, roles).answers for text in samples.texts]
        for role, parts in result.items():
            # All tokens count as the first role's, because they were sampled once
            ids = samples.completion_ids if role == roles[0] else [[] for _ in answers]
            parts.append(Samples(samples.prompt_ids, ids, [answer[role] for answer in answers]))
    return result


def sample_sequentially(
    sample: Sampler, roles: Sequence[str], nodes: list[Node], num_candidates: int
) -> dict[str, list[Samples]]:
    """
    Samples joint answers of one model, whose role is `SOLO`, role by role. It sees all assignments and the answers so
    far.
    """
    answers: list[dict[str, str]] = [{} for _ in range(len(nodes) * num_candidates)]  # of every candidate
    result: dict[str, list[Samples]] = {}
    for number, role in enumerate(roles):
        branches = num_candidates if number else 1  # at first, all candidates of an item have the same prompt
        asked = []
        for k, node in enumerate(nodes):
            for c in range(branches):
                prompt = sequential_prompt(role, roles, node.prompts, answers[k * num_candidates + c])
                asked.append(Node(node.item, (), {SOLO: prompt}, tree=node.tree, path=(number, c)))  # other draws
        samples = sample(asked, num_candidates // branches)[SOLO]
        result[role] = [joined(samples[k : k + branches]) for k in range(0, len(samples), branches)]
        texts = [text for node_samples in result[role] for text in node_samples.texts]
        for answer, text in zip(answers, texts, strict=True):
            answer[role] = text
    return result


def joined(parts: list[Samples]) -> Samples:
    """Joins samples of one item."""
    ids, texts = [ids for part in parts for ids in part.completion_ids], [x for part in parts for x in part.texts]
    return Samples(parts[0].prompt_ids, ids, texts)


def sequential_prompt(role: str, roles: Sequence[str], prompts: dict[str, Prompt], answers: dict[str, str]) -> str:
    """Writes the prompt of a role: the assignments of all roles, and the answers so far."""
    before = "".join(f"<{other}>\n{answer}\n</{other}>\n\n" for other, answer in answers.items())
    before = f"The answers so far:\n\n{before}" if before else ""
    return f"{assignments(roles, prompts)}{before}Write the answer of {role} only:\n\n"

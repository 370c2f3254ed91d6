"""
Makes comparators, the policies that sample the other joint answer of a pair. They get the same nodes as the team that
is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trl_multiagent.endpoints import EndpointClient
from trl_multiagent.environments.base import item_id
from trl_multiagent.environments.centralized import central_prompt, split_blocks
from trl_multiagent.folders import TEAM_FILE
from trl_multiagent.jobs.fingerprint import checksum_of_weights
from trl_multiagent.preferences.config import CANDIDATES_FOLDER, PreferenceConfig
from trl_multiagent.rollout.sampler import TeamSampler, TransformersGenerator
from trl_multiagent.rollout.sampling_arguments import sampling_of
from trl_multiagent.rollout.seats import ask_endpoint
from trl_multiagent.rollout.tree import ByRole, Node, Sample, Samples
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.team.load import load_player, one_line


ROUND_FOLDER = "round_{}"  # in `policy_checkpoint_dir`: the team before this round
ENDPOINT_FOLDER = "endpoint"  # in the folder of the candidates: the answers of an endpoint
SOLO = "model"  # the role of a model that answers for all roles


@dataclass
class Comparator:
    """The policy that sampled one side of the pairs."""

    name: str  # in the columns `chosen_by` and `rejected_by`
    sample: Sample
    facts: dict[str, Any]  # which must be the same when an interrupted collection is resumed


def make_comparator(team: AgentTeam, config: PreferenceConfig, round: int = 0) -> Comparator | None:
    """
    Makes the comparator that `config.comparator_policy` names for a team that is trained, or `None` if there is none.
    `history` depends on the number of the `round`. Raises `ValueError` if a model or team cannot be loaded or has
    other roles, or there is no saved team.
    """
    policy, roles, seed = config.comparator_policy, team.roles, f"{config.seed}/{round}"
    if policy is None:
        return None
    is_central = config.comparator_generation_mode == "centralized"  # one model answers for all roles, in one text
    sample: Sample
    facts: dict[str, Any]
    if policy == "api":
        folder = Path(config.output_dir) / CANDIDATES_FOLDER / ENDPOINT_FOLDER
        client = EndpointClient(config.comparator_endpoint(len(roles)), folder)
        name, facts = f"api:{client.endpoint.model}", {"comparator endpoint": client.endpoint.parameters}
        sample = partial(ask_model, client, team.tokenizers[roles[0]], seed)
    else:
        name, other = policy, team
        if policy == "model":
            names = config.comparator_agents or str(config.comparator_model_name)
            name = f"model:{names if isinstance(names, str) else ','.join(names)}"
            other = load(names, [SOLO] if is_central else roles, team)
        elif policy == "history" and round == 0:
            name = "current"
        elif policy == "history":
            earlier = ROUND_FOLDER.format(max(0, round - config.comparator_history_k))
            folder = Path(str(config.policy_checkpoint_dir)) / earlier
            if not (folder / TEAM_FILE).is_file():
                raise ValueError(f"`comparator_policy: history` needs an earlier team, but {folder} holds no team.")
            name, other = f"history:{earlier}", load(str(folder), roles, team)
        facts = {"comparator weights": checksum_of_weights(other.parameters())}
        sample = team_sampler(other, config, f"{seed}/comparator", len(roles) if is_central else 1)
    if is_central:
        name, sample = f"{name}:centralized", partial(sample_centralized, sample, roles)
    return Comparator(name, sample, {"comparator": name, **facts})


def load(names: str | list[str], roles: Sequence[str], like: AgentTeam) -> AgentTeam:
    """
    Loads a team that is not trained, with the data type and on the device of another one. Models without a
    `team.json` get its reasoning and arguments of chat templates.
    """
    with one_line(f"The comparator cannot be loaded from {names!r}"):
        team = load_player(names, roles, like=like)
    if team.roles != tuple(roles):
        raise ValueError(f"The comparator {names} has the roles {list(team.roles)}, the team {list(roles)}.")
    return team.requires_grad_(False).eval().to(device=like.device, dtype=like.dtype)


def team_sampler(team: AgentTeam, config: PreferenceConfig, seed: str, answers: int = 1) -> TeamSampler:
    """Makes the sampler of a team from the settings. A completion has the room of a number of `answers`."""
    arguments = sampling_of(config, answers * config.max_completion_length)
    generator = TransformersGenerator(team, arguments, config.generation_token_budget, seed=seed)
    return TeamSampler(team, generator, config.use_chat_template)


def ask_model(
    client: EndpointClient, tokenizer: PreTrainedTokenizerBase, seed: str, nodes: list[Node], num_candidates: int
) -> ByRole:
    """
    Samples completions of a model at an endpoint, with one request per completion, all sent at the same time. For
    `seed` and missing answers, see [`~rollout.seats.ask_endpoint`].
    """
    asked = [(node, prompt) for node in nodes for prompt in node.prompts.values() for _ in range(num_candidates)]
    seeds = [f"{seed}/{item_id(node.item)}" for node, _ in asked]
    texts = iter(ask_endpoint(client, [prompt for _, prompt in asked], seeds, "The comparator"))
    samples: ByRole = {}
    for node in nodes:
        for role in node.prompts:
            answers = [next(texts) for _ in range(num_candidates)]
            samples.setdefault(role, []).append(Samples([], [tokenizer(x)["input_ids"] for x in answers], answers))
    return samples


def sample_centralized(sample: Sample, roles: Sequence[str], nodes: list[Node], num_candidates: int) -> ByRole:
    """
    Samples joint answers of one model in the role `SOLO`. It sees the assignments of all roles and answers with a
    tagged block for each, as in a [`~environments.centralized.CentralizedEnvironment`]. The answer of a role without a
    block, or with several, is empty.
    """
    asked = [Node(node.item, (), {SOLO: central_prompt(roles, node.prompts)}, tree=node.tree) for node in nodes]
    result: ByRole = {role: [] for role in roles}
    for samples in sample(asked, num_candidates)[SOLO]:
        answers = [split_blocks(samples.reply(g), roles).answers for g in range(len(samples.texts))]
        for role, parts in result.items():
            # All tokens count as the first role's, because they were sampled once
            ids = samples.completion_ids if role == roles[0] else [[] for _ in answers]
            parts.append(Samples(samples.prompt_ids, ids, [answer[role] for answer in answers]))
    return result

"""
Comparators: the policies that sample the other joint answer of a pair.

A comparator is a name and a sampler, which gets the same nodes as the team that is trained. [`make_comparator`] makes the one
that the settings ask for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_multiagent.environments.base import Prompt
from trl_multiagent.environments.centralized import assignments, central_prompt, split_blocks
from trl_multiagent.preferences.config import PreferenceConfig
from trl_multiagent.rollout.tree import Node, Samples
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.team.files import TEAM_FILE
from trl_multiagent.team.sampler import TeamSampler
from trl_multiagent.trainers.base.run_settings import checksum_of_weights


ROUND_FOLDER = "round_{}"  # in `policy_checkpoint_dir`: the team before this round
SOLO = "model"  # the role of a model that answers for all roles


@dataclass
class Comparator:
    """
    The policy that sampled one side of the pairs.

    Args:
        name (`str`): What the columns `chosen_by` and `rejected_by` say.
        team ([`AgentTeam`]): The models that answer.
        sample (`Callable`): `(nodes, num_candidates) -> {role: samples}`, with one entry of samples per node.
    """

    name: str
    team: AgentTeam
    sample: Callable[[list[Node], int], dict[str, list[Samples]]]

    def describe(self) -> dict[str, Any]:
        """What must be the same when an interrupted collection is continued."""
        return {"comparator": self.name, "comparator weights": checksum_of_weights(self.team.parameters())}


def make_comparator(
    team: AgentTeam, config: PreferenceConfig, round: int = 0, copied: AgentTeam | None = None
) -> Comparator | None:
    """
    Makes the comparator that `config.comparator_policy` names.

    Args:
        team ([`AgentTeam`]):
            The team that is trained.
        config ([`PreferenceConfig`]):
            The settings.
        round (`int`, *optional*, defaults to 0):
            Number of the round, for `history`.
        copied ([`AgentTeam`], *optional*):
            The team of `current_copy`, which was copied earlier. By default, the team is copied now.

    Returns:
        [`Comparator`] or `None`: `None` without a comparator.

    Raises:
        ValueError: the saved team has other roles, or there is no saved team.
        OSError: the model cannot be loaded.
    """
    policy = config.comparator_policy
    if policy is None:
        return None
    if policy == "current":
        return Comparator("current", team, team_sampler(team, config))
    if policy == "current_copy":
        other = team.frozen_copy() if copied is None else copied
        return Comparator("current_copy", other, team_sampler(other, config))
    if policy == "history":
        folder = history_folder(config, round)
        if folder is None:
            return Comparator("current", team, team_sampler(team, config))
        other = load(str(folder), team.roles, team)
        return Comparator(f"history:{folder.name}", other, team_sampler(other, config))
    names = config.comparator_agents or config.comparator_model_name
    assert names is not None  # the configuration has checked it
    label = f"model:{names if isinstance(names, str) else ','.join(names)}"
    mode = config.comparator_generation_mode
    if mode == "decentralized":
        other = load(names, team.roles, team)
        return Comparator(label, other, team_sampler(other, config))
    assert isinstance(names, str)
    solo = load(names, [SOLO], team)
    sampler = CentralizedSampler if mode == "centralized" else SequentialSampler
    return Comparator(f"{label}:{mode}", solo, sampler(solo, team.roles, config))


def history_folder(config: PreferenceConfig, round: int) -> Path | None:
    """
    The folder of the team as it was `comparator_history_k` rounds ago, or at the start if there were fewer rounds; `None` in the
    first round.

    Raises:
        ValueError: no team was saved there.
    """
    if round == 0:
        return None
    assert config.policy_checkpoint_dir is not None  # the configuration has checked it
    folder = Path(config.policy_checkpoint_dir) / ROUND_FOLDER.format(max(0, round - config.comparator_history_k))
    if not (folder / TEAM_FILE).is_file():
        raise ValueError(
            f"`comparator_policy: history` needs the team of an earlier round, but {folder} holds no team."
        )
    return folder


def load(names: str | Sequence[str], roles: Sequence[str], like: AgentTeam) -> AgentTeam:
    """Loads a team that is not trained, with the data type and on the device of another one."""
    names = names if isinstance(names, str) else list(names)
    is_team = isinstance(names, str) and (Path(names) / TEAM_FILE).is_file()
    team = AgentTeam.from_pretrained(names, None if is_team else roles, share_weights=_shares(names, roles, is_team))
    if team.roles != tuple(roles):
        raise ValueError(f"The comparator {names} has the roles {list(team.roles)}, the team {list(roles)}.")
    return team.requires_grad_(False).eval().to(device=like.device, dtype=like.dtype)


def _shares(names: str | list[str], roles: Sequence[str], is_team: bool) -> bool:
    """A model that answers for several roles is loaded once."""
    return isinstance(names, str) and not is_team and len(roles) > 1


def team_sampler(team: AgentTeam, config: PreferenceConfig) -> TeamSampler:
    """Samples with a team as the settings say."""
    return TeamSampler(team, config.use_chat_template, config.generation_token_budget, **config.sampling_kwargs)


# One model that answers for all roles. It sees the assignments of all of them


class CentralizedSampler:
    """
    Samples joint answers of one model. The model sees the assignments of all roles and answers with a tagged block for each, as an agent
    of [`~environments.centralized.CentralizedEnvironment`] does. A role that has no block, or several, has an empty answer.

    Args:
        model ([`AgentTeam`]): A team of one agent.
        roles (`Sequence[str]`): The roles to answer for.
        config ([`PreferenceConfig`]): The settings of the sampling. The completion may have `max_completion_length` tokens per role.
    """

    def __init__(self, model: AgentTeam, roles: Sequence[str], config: PreferenceConfig):
        self.roles = tuple(roles)
        settings = {**config.sampling_kwargs, "max_new_tokens": len(self.roles) * config.max_completion_length}
        self.sampler = TeamSampler(model, config.use_chat_template, config.generation_token_budget, **settings)

    def __call__(self, nodes: list[Node], num_candidates: int) -> dict[str, list[Samples]]:
        asked = [Node(node.item, (), {SOLO: central_prompt(self.roles, node.prompts)}) for node in nodes]
        whole = self.sampler(asked, num_candidates)[SOLO]
        return {role: [self.part(samples, role) for samples in whole] for role in self.roles}

    def part(self, samples: Samples, role: str) -> Samples:
        """The part of one role. All tokens count as those of the first role, because they were sampled once."""
        ids = samples.completion_ids if role == self.roles[0] else [[] for _ in samples.texts]
        texts = [split_blocks(text, self.roles).answers[role] for text in samples.texts]
        return Samples(samples.prompt_ids, ids, texts)


class SequentialSampler:
    """
    Samples joint answers of one model, role by role. The model sees the assignments of all roles and the answers of the roles
    before.

    Args:
        model ([`AgentTeam`]): A team of one agent.
        roles (`Sequence[str]`): The roles to answer for, in this order.
        config ([`PreferenceConfig`]): The settings of the sampling.
    """

    def __init__(self, model: AgentTeam, roles: Sequence[str], config: PreferenceConfig):
        self.roles = tuple(roles)
        self.sampler = team_sampler(model, config)

    def __call__(self, nodes: list[Node], num_candidates: int) -> dict[str, list[Samples]]:
        answers: list[dict[str, str]] = [{} for _ in range(len(nodes) * num_candidates)]  # of every candidate
        result: dict[str, list[Samples]] = {}
        for role in self.roles:
            first = not result  # all candidates of an item have the same prompt
            asked = [
                Node(node.item, (), {SOLO: self.prompt(role, node.prompts, answers[k * num_candidates + c])})
                for k, node in enumerate(nodes)
                for c in range(1 if first else num_candidates)
            ]
            samples = self.sampler(asked, num_candidates if first else 1)[SOLO]
            if not first:
                samples = [
                    join_samples(samples[k : k + num_candidates]) for k in range(0, len(samples), num_candidates)
                ]
            for answer, text in zip(answers, [text for group in samples for text in group.texts], strict=True):
                answer[role] = text
            result[role] = samples
        return result

    def prompt(self, role: str, prompts: dict[str, Prompt], answers: dict[str, str]) -> str:
        before = "".join(f"<{other}>\n{answer}\n</{other}>\n\n" for other, answer in answers.items())
        before = f"The answers so far:\n\n{before}" if before else ""
        return f"{assignments(self.roles, prompts)}{before}Write the answer of {role} only:\n\n"


def join_samples(parts: list[Samples]) -> Samples:
    """The candidates of one item, each of which was sampled from a prompt of its own."""
    ids = [ids for part in parts for ids in part.completion_ids]
    return Samples(parts[0].prompt_ids, ids, [text for part in parts for text in part.texts])

"""Plays a role of a task with an agent of a saved team, which is not trained."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_multiagent.environments.base import Turn, item_id
from trl_multiagent.environments.task_errors import UnavailableError, function_name
from trl_multiagent.models.pretrained import quiet_loading
from trl_multiagent.rollout.options import FULL_HISTORY, HistoryOptions
from trl_multiagent.rollout.sampler import TeamSampler, TransformersGenerator
from trl_multiagent.rollout.sampling_arguments import sampling_arguments
from trl_multiagent.rollout.seats import Branch, Seat, training_step
from trl_multiagent.rollout.tree import Node, derive_seed
from trl_multiagent.team.load import LoadError, TeamLoader


ANY_TEAM = TeamLoader("")


class TeamSeat(Seat):
    """
    Plays a role with an agent of a team that is not trained. The team is loaded when it is first needed.

    Args:
        team (`str`, `Path` or `Callable[[], TeamSampler]`): Folder or id of a saved team or of a model, or a
            function that makes the sampler of a team.
        name (`str`, *optional*): What a resumed run compares. By default `team`, or the name of the function.
        agent (`str`, *optional*): The role of the agent in the team. By default the role of the seat.
        loader ([`TeamLoader`], *optional*): Loads the team.
        token_budget, seed (*optional*): See [`~rollout.sampler.TransformersGenerator`].
        use_chat_template, history_options (*optional*): See [`~rollout.sampler.TeamSampler`].
        stop_strings (`Mapping[str, Sequence[str]]`, *optional*): Strings that end an answer, by the agent.
        **sampling: Settings of the sampling as for [`AgentTeam.collaborate`], such as `max_new_tokens`.
    """

    def __init__(
        self,
        team: str | Path | Callable[[], TeamSampler],
        name: str | None = None,
        agent: str | None = None,
        loader: TeamLoader = ANY_TEAM,
        token_budget: int | None = None,
        seed: int = 0,
        use_chat_template: bool | None = None,
        history_options: HistoryOptions = FULL_HISTORY,
        stop_strings: Mapping[str, Sequence[str]] | None = None,
        **sampling: Any,
    ):
        team = str(team) if isinstance(team, Path) else team
        self.agent = agent
        self.name = name or (team if isinstance(team, str) else function_name(team))
        self.sampler: TeamSampler | None = None

        def load(role: str) -> TeamSampler:
            if not isinstance(team, str):
                return team()
            member = agent or role
            try:
                with quiet_loading():  # a population loads a member at any step
                    loaded = loader.load_player(team, [member])
            except LoadError as error:
                raise UnavailableError(f"`seats.{role}`: {error}") from error
            if member not in loaded.roles:
                raise UnavailableError(
                    f"`seats.{role}`: {team} has the roles {', '.join(loaded.roles)}, not {member!r}."
                )
            loaded.requires_grad_(False).eval()
            generator = TransformersGenerator(loaded, sampling_arguments(sampling), token_budget, stop_strings, seed)
            return TeamSampler(loaded, generator, use_chat_template, history_options)

        self.load = load

    def answer(self, role: str, branches: Sequence[Branch]) -> list[str]:
        agent = self.agent or role
        if self.sampler is None or agent not in self.sampler.team.roles:
            self.sampler = self.load(role)

        def own(texts: Mapping[str, Any]) -> dict[str, Any]:
            return {agent: texts[role]} if role in texts else {}

        nodes, asked = [], Counter[int]()
        for x in branches:
            history = tuple(Turn(own(t.prompts), own(t.joint_action), t.outcome) for t in x.history)
            # An answer's draws depend on the role, the item and the texts, not on other branches. Equal branches get
            # different answers
            past = json.dumps([turn.joint_action for turn in x.history])
            place = derive_seed(role, item_id(x.item), past, x.prompts[role])
            nodes.append(Node(x.item, history, own(x.prompts), tree=place, episode=asked[place]))
            asked[place] += 1
        self.sampler.stream = f"seat, step {training_step()}"
        return [samples.reply(0) for samples in self.sampler.sample((agent,), nodes, 1)[agent]]

    def describe(self) -> dict[str, Any]:
        return {"team": self.name, "agent": self.agent}

    def release(self) -> None:
        self.sampler = None

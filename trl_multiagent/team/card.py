"""The facts about the agents of a team, for its model card and for the report of a run."""

from typing import Any, cast

from trl.trainer.utils import get_config_model_id

from trl_multiagent.models.gguf import gguf_file_of
from trl_multiagent.models.pretrained import class_of, hub_id
from trl_multiagent.rollout.sampler import TeamSampler


def facts_of(team: Any) -> list[dict[str, Any]]:
    """Returns the facts about each agent of an [`AgentTeam`], see [`~hub.team_card`]."""
    sampler = TeamSampler(team, cast(Any, None))
    agents = []
    for role, agent in team.agents.items():
        base, gguf_file = gguf_file_of(get_config_model_id(agent.config))
        is_adapter = role in team.adapted_roles
        agents.append(
            {
                "role": role,
                "template_kwargs": sampler.template_kwargs(role),
                "base": hub_id(base),
                "base_revision": team.policies[role].peft_config[role].revision if is_adapter else None,
                "gguf_file": gguf_file,
                "folder": team.folder(role),
                "is_adapter": is_adapter,
                "model_class": class_of(agent.config).__name__,
            }
        )
    return agents

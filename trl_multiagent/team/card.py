"""The facts about the agents of a team, for its model card and for the report of a run, and the upload of a team."""

import tempfile
from pathlib import Path
from typing import Any, cast

from huggingface_hub import CommitInfo
from trl.trainer.utils import get_config_model_id

from trl_multiagent.folders import CARD_FILE
from trl_multiagent.hub import push_folder, team_card
from trl_multiagent.models.gguf import gguf_file_of
from trl_multiagent.models.pretrained import class_of, hub_id
from trl_multiagent.rollout.sampler import TeamSampler


def facts_of(team: Any) -> list[dict[str, Any]]:
    """Returns the facts about each agent of an [`AgentTeam`], see [`~hub.team_card`]."""
    sampler = TeamSampler(team, cast(Any, None))
    agents = []
    for role, agent in team.agents.items():
        base, file = gguf_file_of(get_config_model_id(agent.config))
        is_adapter = role in team.adapted_roles
        agents.append(
            {
                "role": role,
                "template_kwargs": sampler.template_kwargs(role),
                "base": hub_id(base),
                "base_revision": team.policies[role].peft_config[role].revision if is_adapter else None,
                "gguf_file": file.get("gguf_file"),
                "folder": team.folder(role),
                "is_adapter": is_adapter,
                "model_class": class_of(agent.config).__name__,
            }
        )
    return agents


def push_team(team: Any, repo_id: str, revision: str | None, create_pr: bool, **options: Any) -> CommitInfo:
    """Uploads a team and its model card, see [`~AgentTeam.push_to_hub`]."""
    with tempfile.TemporaryDirectory() as folder:
        team.save_pretrained(folder)
        team_card(facts_of(team), repo_id, revision=None if create_pr else revision).save(Path(folder) / CARD_FILE)
        options |= {"revision": revision, "create_pr": create_pr, "advice": "Call `push_to_hub` again."}
        return push_folder(folder, repo_id, **options)

"""The team: agents, their adapters, their files."""

from trl_multiagent.team.agent_team import AgentTeam


__all__ = ["AgentTeam"]

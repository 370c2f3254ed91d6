"""Agents on several devices of one process, the argument `devices` of a trainer."""

from typing import Any

import torch
from transformers.utils import logging

from trl_multiagent.team.agent_team import AgentTeam


logger = logging.get_logger(__name__)


def check_devices(args: Any) -> None:
    """Checks that this process has the agents' devices. Without a GPU, a warning says that all are on the CPU."""
    if args.world_size > 1 or args.deepspeed_plugin is not None:
        raise ValueError("`devices` is for one process without DeepSpeed: leave it out, or start one process.")
    if args.device.type == "cpu":
        logger.warning("`devices` has no effect: this machine has no GPU, and all agents are on the CPU.")
    elif max(args.devices.values()) >= (available := torch.accelerator.device_count()):
        raise ValueError(f"`devices` is {args.devices}, but this machine has the GPUs 0 to {available - 1}.")


def place(team: AgentTeam, args: Any) -> None:
    """Moves the agents to their devices. Raises `ValueError` if an agent of the team cannot have one of its own."""
    if set(args.devices) != set(team.roles):
        raise ValueError(f"`devices` has the roles {list(args.devices)}; it must have the team's: {list(team.roles)}.")
    if team.form != "full" or args.critic_names(team.trained_roles):
        raise ValueError(
            "`devices` is for agents with a model each and without critics: leave it out for LoRA teams, shared "
            "weights and actor-critic methods."
        )
    team.place({role: torch.device(args.device.type, number) for role, number in args.devices.items()})

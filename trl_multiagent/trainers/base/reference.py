"""The reference policy of a team: the initial policy of every agent."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from trl.models import prepare_deepspeed
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import add_fused_lm_head

from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.team_config import TeamConfig


if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object  # the trainer itself follows in the bases of the class that mixes this in


class ReferenceMixin(Base):
    """
    Stores the reference policy of a team, and computes with it. Part of [`TeamTrainerMixin`].

    The reference of a LoRA team is part of the team: its bases, or copies of adapters that were trained before. That of
    any other team is a frozen copy, `ref_model`.
    """

    team: AgentTeam

    def _make_reference(self) -> AgentTeam | None:
        """Stores the initial policy. Returns a copy of the team, or `None` if the team itself stores the reference."""
        if self.team.has_adapters:
            self.team.keep_reference()
            return None
        return self.team.frozen_copy()

    def _set_up_reference(self, reference: AgentTeam | None, temperature: float = 1.0) -> None:
        """Prepares the copy that `_make_reference` returned. Called after the TRL trainer is initialized."""
        if reference is None:
            return
        for model in reference.base_models:
            add_fused_lm_head(model, temperature=temperature)
        if self.is_deepspeed_enabled:
            self.ref_model = prepare_deepspeed(reference, self.accelerator)
        else:
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)
        if self.args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(ref_model=self.ref_model, accelerator=self.accelerator))

    @contextlib.contextmanager
    def _computing_as_reference(self) -> Iterator[torch.nn.Module]:
        """Gives the wrapped team whose agents compute with their reference policies within the block."""
        with torch.no_grad(), self.team.evaluating(), self.accelerator.autocast():
            if self.team.has_adapters:
                with self.team.as_reference():
                    yield self.model_wrapped
            else:
                yield self.ref_model


def check_reference_sync(team: AgentTeam, args: TeamConfig) -> None:
    """Raises an error if the reference policy is to be updated, but is not a model of its own."""
    if args.sync_ref_model and team.has_adapters:
        raise ValueError(
            "`sync_ref_model` updates a separate reference model, but the reference of a LoRA team is its own "
            "base. Leave it False, or train agents without adapters."
        )

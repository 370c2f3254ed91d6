"""Samples with the team that a trainer trains."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.models import unwrap_model_for_generation
from trl.models.utils import add_hooks, remove_hooks

from trl_multiagent.jobs.distributed import error_barrier
from trl_multiagent.models.grouped_lora import Stacked
from trl_multiagent.models.pretrained import adapter_parameters
from trl_multiagent.rollout.sampler import Completions, Level, TransformersGenerator
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.team_trainer import TeamTrainerMixin
from trl_multiagent.trainers.base.vllm import make_generations, sample_level


class TrainerGenerator(TransformersGenerator):
    """
    Samples with the team of a trainer, whose weights DeepSpeed may have divided among processes. `gathers`: whether
    ZeRO-3 gathers them. The other arguments are those of [`TransformersGenerator`].
    """

    synchronized = True  # whether all processes sample at the same time, so that all end if one fails

    def __init__(
        self,
        trainer: TeamTrainerMixin,
        arguments: dict[str, Any],
        token_budget: int | None = None,
        stop_strings: Mapping[str, Sequence[str]] | None = None,
        gathers: bool = True,
    ):
        super().__init__(trainer.team, arguments, token_budget, stop_strings, trainer.args.seed)
        self.trainer = trainer
        self.gathers = gathers

    @contextlib.contextmanager
    def computing(self, roles: list[str]) -> Iterator[tuple[PreTrainedModel, Stacked | None]]:
        trainer = self.trainer
        if self.synchronized and is_deepspeed_zero3_enabled():
            # ZeRO-3 gathers weights next, and a failed process cannot take part in that. Elsewhere, processes may make
            # different numbers of calls
            error_barrier(trainer.accelerator)
        with (
            super().computing(roles) as sampling,
            self._gathering(roles),
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=False,
                generation_kwargs=self.arguments,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ),
            trainer.accelerator.autocast(),
        ):
            yield sampling

    @contextlib.contextmanager
    def _gathering(self, roles: list[str]) -> Iterator[None]:
        """
        Gathers the weights of agents on one model within the block. TRL would gather the whole team for each agent.
        """
        if not self.gathers or not is_deepspeed_zero3_enabled():
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(sampling_parameters(self.trainer.team, roles)):
            remove_hooks(self.trainer.model_wrapped)
            yield
            add_hooks(self.trainer.model_wrapped)


def sampling_parameters(team: AgentTeam, roles: Sequence[str]) -> list[torch.nn.Parameter]:
    """
    Returns the parameters with which agents on one model sample: those of the model without other agents' adapters.
    """
    policy = team.policies[roles[0]]
    adapters = [name for name in policy.peft_config if name not in roles] if isinstance(policy, PeftModel) else []
    others = {id(parameter) for name in adapters for parameter in adapter_parameters(policy, name)}
    return [parameter for parameter in policy.parameters() if id(parameter) not in others]


class VLLMGenerator:
    """Samples with vLLM. Sends the weights to vLLM before the first completions after an optimizer step."""

    synchronized = True  # as in [`TrainerGenerator`]

    def __init__(self, trainer: TeamTrainerMixin):
        team = trainer.team
        end_tokens = {role: team.end_tokens(role) for role in team.roles}
        self.trainer = trainer
        self.agents = make_generations(team.policies, end_tokens, trainer.accelerator, trainer.args)
        self.max_new_tokens: int = trainer.args.max_completion_length
        self.stop_strings: Mapping[str, Sequence[str]] = trainer.args.stop_strings or {}

    def generate(self, level: Level) -> dict[str, list[Completions]]:
        trainer = self.trainer
        for role in level.prompt_ids:
            self._wait()
            # The weights of a frozen agent are sent once
            step = 0 if role in trainer.team.frozen else trainer.state.global_step
            with trainer.team.activate(role):
                self.agents[role].update(role, step)
        self._wait()
        return sample_level(self.agents, level.prompt_ids, level.num_generations, trainer.accelerator)

    def _wait(self) -> None:
        """Waits for the other processes before a collective operation."""
        if self.synchronized:
            error_barrier(self.trainer.accelerator)

    def forget_weights(self) -> None:
        """Makes the next call send the weights again."""
        for agent in self.agents.values():
            agent.sent_steps.clear()

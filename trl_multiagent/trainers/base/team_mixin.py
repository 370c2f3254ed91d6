"""What every team trainer shares: acting on one agent at a time, optimizer groups, checkpoints."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, set_seed
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from trl_multiagent.environments.task_errors import describe
from trl_multiagent.models.router_loss import has_routers, router_loss_coef
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.checkpoints import CheckpointCallback, CheckpointMixin
from trl_multiagent.trainers.base.distribution import check_distribution
from trl_multiagent.trainers.base.hub_mixin import TeamHubMixin
from trl_multiagent.trainers.base.rescue import SaveError, save_or_rescue
from trl_multiagent.trainers.base.team_config import TeamConfig


logger = logging.get_logger(__name__)


class TeamTrainerMixin(CheckpointMixin, TeamHubMixin):
    """
    Makes a TRL trainer train an [`AgentTeam`]: `GRPOTrainer`, `DPOTrainer`, `RewardTrainer`.

    Goes before the TRL trainer in the bases; its configuration class has [`TeamConfig`] in its bases. Inside
    [`~TeamTrainerMixin.agent_scope`] the inherited methods, which expect one model and one tokenizer, act on one agent, and
    what they log is logged as `agents/<role>/...`.

    A subclass calls `_prepare_team` before the TRL trainer is initialised and `_set_up_agents` after it. It says

    - what belongs to an agent: `_attributes_of_agent`;
    - what a checkpoint must match: `_run_settings`, and which reference model it has: `_reference`;
    - what the model card says: `_card_facts`, `_card_environment`, `_card_settings`.
    """

    team: AgentTeam

    def _prepare_team(self, team: AgentTeam, args: TeamConfig) -> None:
        """Checks which agents are trained and how, and prepares them. Called before the TRL trainer is initialised."""
        check_agent_settings(team, args)
        self.team = team
        team.freeze(args.frozen_agents or ())
        team.uses_dropout = not args.disable_dropout
        if args.process_index == 0:
            warn_of_dropout(team)
        if args.deepspeed_plugin is not None:
            # For "auto" transformers takes the hidden size squared. DeepSpeed's own default of 5e8 gradients is a buffer
            # of a gigabyte, which is more than the shards of a small team
            args.deepspeed_plugin.deepspeed_config["zero_optimization"].setdefault("reduce_bucket_size", "auto")
        if team.has_adapters and args.gradient_checkpointing:
            team.enable_input_require_grads()
            if args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
                # As in TRL: with ZeRO-3, layers that are partly frozen need the reentrant implementation
                kwargs = args.gradient_checkpointing_kwargs or {}
                args.gradient_checkpointing_kwargs = {**kwargs, "use_reentrant": True}

    def _set_up_agents(self) -> None:
        """Collects what [`~TeamTrainerMixin.agent_scope`] swaps. Called once the TRL trainer is initialised."""
        check_distribution(self.accelerator)
        if self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = False  # every backward reaches every agent
        self.add_callback(CheckpointCallback(self))
        self._agent_attributes = {
            role: self._attributes_of_agent(role, tokenizer) for role, tokenizer in self.team.tokenizers.items()
        }

    def _attributes_of_agent(self, role: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The trainer's attributes that belong to one agent, by name."""
        return {"processing_class": tokenizer, "_tokenizer": tokenizer}

    def _begin_training(self) -> None:
        # Random numbers that were drawn since the trainer was made, by loading another team or by an evaluation, must not
        # change the run. A resumed run restores the generators after this
        set_seed(self.args.seed, device_specific=True)
        super()._begin_training()

    @contextlib.contextmanager
    def agent_scope(self, role: str) -> Iterator[None]:
        """Makes the inherited single-agent methods act on one agent."""
        attributes = self._agent_attributes[role]
        saved = {name: getattr(self, name) for name in attributes}
        metrics = self._metrics
        self._metrics = {mode: defaultdict(list) for mode in metrics}
        for name, value in attributes.items():
            setattr(self, name, value)
        try:
            with self.team.activate(role):
                yield
        finally:
            for name, value in saved.items():
                setattr(self, name, value)
            for mode, values in self._metrics.items():
                for name, entries in values.items():
                    metrics[mode][f"agents/{role}/{name}"].extend(entries)
            self._metrics = metrics

    # Optimizer

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        if self.args.agent_learning_rates:
            roles = self.team.trained_roles
            owner = {parameter: role for role in roles for parameter in self.team.agent_parameters(role)}
            groups = []
            for group in optimizer.param_groups:
                for role in (*roles, None):  # `None` owns what belongs to no agent
                    parameters = [parameter for parameter in group["params"] if owner.get(parameter) == role]
                    rate = self.args.agent_learning_rates.get(role, group["lr"])
                    groups.append({**group, "params": parameters, "lr": rate})
            optimizer.param_groups = [group for group in groups if group["params"]]
        return optimizer

    def _get_grad_norm(self, model, grad_norm=None):
        total = super()._get_grad_norm(model, grad_norm)
        if self.accelerator.distributed_type != DistributedType.DEEPSPEED:  # its engine keeps the gradients to itself
            # The gradients are clipped by now: undo the factor that clipping applied to all of them
            limit = self.args.max_grad_norm
            factor = max(1.0, float(total) / limit) if limit > 0 else 1.0
            for role in self.team.trained_roles:
                parameters = self.team.agent_parameters(role)
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                norm = factor * torch.nn.utils.get_total_norm(gradients).item()
                self._metrics["train"][f"agents/{role}/grad_norm"].append(norm)
        return total

    # What a checkpoint holds of the team: `team.json`, and one standard folder per agent

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if not self.args.should_save:
            return
        output_dir = Path(self.args.output_dir if output_dir is None else output_dir)
        save_or_rescue(self.team, output_dir, state_dict, self.args.output_dir)
        try:
            torch.save(self.args, output_dir / "training_args.bin")
        except Exception as error:
            if self._saving:  # a checkpoint, which is now of no use
                raise
            raise SaveError(
                f"{output_dir / 'training_args.bin'} could not be written ({describe(error)}). The team itself is in "
                f"{output_dir.absolute()}."
            ) from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        self.team.load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            self.team.load_weights(self.state.best_model_checkpoint)


def warn_of_dropout(team: AgentTeam) -> None:
    """Says what a setting of dropout that a user gave does, where that is not what one would expect."""
    if team.uses_dropout:
        logger.warning(
            "`disable_dropout=False`: the update has dropout and the sampling has none, so the update differs from its "
            "formula and depends on how the rows are split into micro-batches."
        )
    elif team.has_adapters:
        roles = [role for role, model in team.policies.items() if model.peft_config[role].lora_dropout > 0]
        if roles:
            logger.warning(
                f"The `lora_dropout` of {', '.join(roles)} has no effect: the update is computed without dropout, as the "
                "completions were sampled. `disable_dropout=False` switches it on."
            )


def check_agent_settings(team: AgentTeam, args: TeamConfig) -> None:
    """Refuses settings of single agents that do not fit the team."""
    if args.agent_learning_rates and not set(args.agent_learning_rates) <= set(team.roles):
        raise ValueError(f"`agent_learning_rates` names {sorted(args.agent_learning_rates)}; roles: {team.roles}.")
    if args.agent_learning_rates and team.has_shared_weights:
        raise ValueError("`agent_learning_rates` needs agents with weights of their own; this team shares them.")


def router_loss_coefs(team: AgentTeam, args: TeamConfig) -> dict[str, float]:
    """
    The weights of the router losses of the agents that are trained with one.

    Raises:
        ValueError: a weight is set and no agent is a mixture of experts, or the loss would have no gradient.
    """
    agents = {role: team.agents[role] for role in team.trained_roles if has_routers(team.agents[role])}
    if args.router_aux_loss_coef and not agents:
        raise ValueError(
            f"`router_aux_loss_coef` is {args.router_aux_loss_coef}, but no agent that is trained is a mixture of experts "
            "that returns its router logits: leave it out."
        )
    coefs = {role: router_loss_coef(agent.config, args.router_aux_loss_coef) for role, agent in agents.items()}
    coefs = {role: coef for role, coef in coefs.items() if coef != 0.0}
    if coefs and args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            f"The router loss of {', '.join(coefs)} has no gradient through reentrant checkpointing. Set `use_reentrant` in "
            "`gradient_checkpointing_kwargs` to False, or for LoRA under ZeRO-3, which needs it, `gradient_checkpointing` "
            "to False; or train without this loss: `router_aux_loss_coef=0.0`."
        )
    return coefs

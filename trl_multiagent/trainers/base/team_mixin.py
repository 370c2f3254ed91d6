"""What every team trainer shares: acting on one agent at a time, optimizer groups, checkpoints."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate.utils import DistributedType, set_seed
from transformers import GenerationConfig, TrainingArguments
from transformers.utils import logging

from trl_multiagent.environments.base import Environment, check_roles
from trl_multiagent.environments.task_errors import describe
from trl_multiagent.models.router_loss import has_routers, router_loss_coef
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.checkpoints import CheckpointCallback, CheckpointMixin
from trl_multiagent.trainers.base.hub_mixin import TeamHubMixin
from trl_multiagent.trainers.base.rescue import SaveError, save_or_rescue


logger = logging.get_logger(__name__)


class TeamTrainerMixin(CheckpointMixin, TeamHubMixin):
    """
    Makes a TRL trainer train an [`AgentTeam`].

    Goes before the TRL trainer in the bases. The trainer's methods that expect one model and one tokenizer act on one
    agent inside [`~TeamTrainerMixin.agent_scope`], and what they log there is logged as `agents/<role>/...`.
    """

    team: AgentTeam

    def _prepare_team(self, args: TrainingArguments) -> None:
        """Settles which agents are trained, and how. Called before the TRL trainer is initialised."""
        self.team.freeze(args.frozen_agents or ())
        self.team.uses_dropout = not args.disable_dropout
        if args.process_index == 0:
            warn_of_dropout(self.team)
        if args.deepspeed_plugin is not None:
            # For "auto" transformers takes the hidden size squared. DeepSpeed's own default of 5e8 gradients is a buffer
            # of a gigabyte, which is more than the shards of a small team
            args.deepspeed_plugin.deepspeed_config["zero_optimization"].setdefault("reduce_bucket_size", "auto")
        if self.team.has_adapters and args.gradient_checkpointing:
            self.team.enable_input_require_grads()
            if args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
                # As in TRL: with ZeRO-3, layers that are partly frozen need the reentrant implementation
                kwargs = args.gradient_checkpointing_kwargs or {}
                args.gradient_checkpointing_kwargs = {**kwargs, "use_reentrant": True}

    def _set_up_agents(self) -> None:
        """Collects what [`~TeamTrainerMixin.agent_scope`] swaps. Called once the TRL trainer is initialised."""
        self.add_callback(CheckpointCallback(self))
        self._agent_attributes = {}
        for role, tokenizer in self.team.tokenizers.items():
            eos_token_ids = self.team.end_tokens(role)
            generation_kwargs = {
                **self.generation_kwargs,
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": eos_token_ids,
            }
            self._agent_attributes[role] = {
                "processing_class": tokenizer,
                "_tokenizer": tokenizer,
                "eos_token_ids": eos_token_ids,
                "generation_kwargs": generation_kwargs,
                "generation_config": GenerationConfig(**generation_kwargs, disable_compile=True),
            }

    def _begin_training(self) -> None:
        # What was drawn between the making of the trainer and its start must not matter: another team that was loaded,
        # an evaluation. A resumed run restores the generators after this
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
                    if name.startswith("clip_ratio/"):  # the update is on-policy: the ratio is 1, nothing is clipped
                        continue
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
                for role in roles:
                    parameters = [parameter for parameter in group["params"] if owner[parameter] == role]
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


def check_team(team: AgentTeam, environment: Environment, num_agents: int | None) -> None:
    """Refuses a team that does not fit the environment."""
    if not isinstance(environment, Environment):
        raise TypeError(f"`environment` must be an `Environment`, got `{type(environment).__name__}`: subclass it.")
    check_roles(environment.roles)
    if tuple(team.roles) != tuple(environment.roles):
        raise ValueError(f"The team has the roles {list(team.roles)}, the environment {list(environment.roles)}.")
    if num_agents is not None and num_agents != len(team.roles):
        raise ValueError(f"`num_agents` is {num_agents}, but the environment has the roles {list(environment.roles)}.")


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


def check_agent_settings(team: AgentTeam, args: TrainingArguments) -> None:
    """Refuses settings of single agents that do not fit the team."""
    if args.agent_learning_rates and not set(args.agent_learning_rates) <= set(team.roles):
        raise ValueError(f"`agent_learning_rates` names {sorted(args.agent_learning_rates)}; roles: {team.roles}.")
    if args.agent_learning_rates and team.has_shared_weights:
        raise ValueError("`agent_learning_rates` needs agents with weights of their own; this team shares them.")
    if args.sync_ref_model and team.has_adapters:
        raise ValueError(
            "`sync_ref_model` moves a reference model of its own; the reference of a LoRA team is its base."
        )


def router_loss_coefs(team: AgentTeam, args: TrainingArguments) -> dict[str, float]:
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

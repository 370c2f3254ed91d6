"""Makes a trainer of TRL train a team, in one process or several."""

import contextlib
import inspect
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.integrations import integration_utils, is_deepspeed_zero3_enabled, unset_hf_deepspeed_config
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput
from transformers.utils import logging
from trl.models import prepare_deepspeed
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import add_fused_lm_head

from trl_multiagent.environments.base import Turn
from trl_multiagent.environments.task_errors import show
from trl_multiagent.hub import environment_name
from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.jobs.fingerprint import describe_dataset
from trl_multiagent.models.router_loss import expert_load, has_routers, router_loss_coef
from trl_multiagent.rollout.tree import Node, turns_of_episodes
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.checkpoints import CheckpointCallback, CheckpointMixin, describe_run, writing
from trl_multiagent.trainers.base.common_config import check_trained_weights
from trl_multiagent.trainers.base.hub import TeamHubMixin
from trl_multiagent.trainers.base.metrics import RolloutTotals
from trl_multiagent.trainers.base.run_report import RunReport
from trl_multiagent.trainers.base.team_config import TeamConfig, temporarily_set
from trl_multiagent.trainers.base.trackers import tracker_names


logger = logging.get_logger(__name__)

# Arguments of TRL's trainers that the trainers of teams do not have, and their replacements
INSTEAD = {
    "model": "load the agents with `team=AgentTeam.from_pretrained(model, roles=environment.roles)`",
    "reward_funcs": "give `environment=FunctionEnvironment(prompts, reward_funcs)`",
    "peft_config": "give it to `AgentTeam.from_pretrained(model, roles, peft_config=peft_config)`",
    "processing_class": "every agent of the team has a tokenizer of its own, which is loaded with it",
}


class CommonTrainerMixin(CheckpointMixin):
    """
    Makes a trainer evaluate, predict and train in any order.

    If accelerate has prepared a model for an evaluation, it does not wrap the model for a training. Without the
    wrapper, processes do not share gradients, and each trains its own model. So evaluations here do not prepare the
    model.
    """

    deepspeed: Any  # the engine; `None` before a training
    model_wrapped: Any
    _was_given_optimizer = False

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Without a seed, each process takes one from its random numbers, which differ between processes after a
        # training
        config = self.accelerator.dataloader_config
        if config.data_seed is None:
            config.data_seed = self.args.seed

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[torch.nn.Module, DataLoader]:
        if self.is_deepspeed_enabled and self.deepspeed is not None:  # a second training makes an engine of its own
            if self._was_given_optimizer:
                raise ValueError("Under DeepSpeed, `optimizers` are for one training: make another trainer.")
            self.deepspeed, self.model_wrapped, self.optimizer, self.lr_scheduler = None, self.model, None, None
        self._was_given_optimizer = self.optimizer is not None
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.accelerator.num_processes > 1 and self.model_wrapped is self.model:
            raise RuntimeError(
                "accelerate has not wrapped the model for several processes, so each of them would train its own. Was "
                "it given to `Accelerator.prepare` before the training?"
            )
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        # Before a training there is no engine. transformers makes one for an evaluation only under ZeRO-3
        had_engine = self.deepspeed is not None
        needs_engine = had_engine or is_deepspeed_zero3_enabled()
        try:
            with (
                temporarily_set(self, is_deepspeed_enabled=self.is_deepspeed_enabled and needs_engine),
                temporarily_set(self.accelerator, prepare_model=lambda model, **_: model),
                self.accelerator.autocast(),  # which the preparation would have added
            ):
                return super().evaluation_loop(*args, **kwargs)
        finally:
            if self.deepspeed is not None and not had_engine:  # it has no optimizer; the training makes its own
                self.accelerator.free_memory()
                self.deepspeed, self.model_wrapped = None, self.model


class TeamTrainerMixin(CommonTrainerMixin, TeamHubMixin):
    """
    Makes a TRL trainer of causal language models, such as `GRPOTrainer` or `DPOTrainer`, train an [`AgentTeam`].

    The mixin precedes the TRL trainer in the bases, and [`TeamConfig`] precedes the TRL configuration in the bases of
    the configuration class.

    A subclass calls `_prepare_team` before it initializes the TRL trainer, and `_set_up_agents` after that. In
    between, it restores the forward of the team: most TRL trainers patch it with `add_fused_lm_head`, as if the team
    were a single model. The patch belongs on each of `team.base_models` (tests/trainers/test_team_mixin.py has an
    example). A subclass can override `_run_settings`, the settings that a checkpoint must match, and `_card_facts` and
    `_card_settings`, the contents of the model card.
    """

    team: AgentTeam
    generator: Any  # the [`TrainerGenerator`] or [`VLLMGenerator`] of this trainer
    _evaluated: list[RolloutTotals]  # totals of the batches of the current evaluation
    _metrics: dict[str, defaultdict[str, list[float]]]
    _router_loss_coefs: dict[str, float]  # by role, for agents that have a router loss
    _expert_loads: dict[str, torch.Tensor]  # by role, in the current batch
    _config_class: type[TeamConfig] = TeamConfig  # class of the default configuration
    _trains_critics = False
    _eval_prefix = "eval"  # prefix of the metrics of the current evaluation

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        check_call(cls, args, kwargs)
        return super().__new__(cls)

    def _prepare_team(self, team: AgentTeam, args: TeamConfig) -> None:
        """
        Checks and applies the arguments about the agents. A subclass calls this before it initializes the TRL trainer.
        """
        check_agent_settings(team, args)
        check_devices(team, args)
        if team.critics is not None and not self._trains_critics:
            raise ValueError(
                "The team has the critics of an earlier trainer, which this one does not train. Save the team, "
                "and load its "
                "agents with `AgentTeam.from_pretrained`."
            )
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = False  # every backward pass reaches every trained agent
        self.team = team
        if args.devices is not None:
            team.place({role: torch.device(args.device.type, number) for role, number in args.devices.items()})
        team.freeze(args.frozen_agents or ())
        check_trained_weights(team.named_parameters(), args)
        for role in team.trained_roles:
            if not all(x.is_floating_point() for x in team.agent_parameters(role)):
                raise ValueError(
                    f"The weights of agent {role!r} are quantized, so they cannot be trained: load it with a "
                    "`peft_config`."
                )
        team.uses_dropout = not args.disable_dropout
        if args.process_index == 0:
            warn_about_dropout(team)
        if args.deepspeed_plugin is not None:
            # "auto" makes transformers use the hidden size squared. DeepSpeed's own default, 5e8 gradients, needs a
            # buffer of one gigabyte, which is more than the shards of a small team
            args.deepspeed_plugin.deepspeed_config["zero_optimization"].setdefault("reduce_bucket_size", "auto")
        if team.has_adapters and args.gradient_checkpointing:
            team.enable_input_require_grads()
            if args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
                # As in TRL: under ZeRO-3, partly frozen layers need the reentrant implementation of checkpointing
                kwargs = args.gradient_checkpointing_kwargs or {}
                args.gradient_checkpointing_kwargs = {**kwargs, "use_reentrant": True}

    def _set_up_agents(self) -> None:
        """Checks the accelerator and adds callbacks. A subclass calls this after it initializes the TRL trainer."""
        check_distribution(self.accelerator)
        self.add_callback(CheckpointCallback(self))
        self.add_callback(RunReport(self._name, self._report_facts))

    def _report_facts(self) -> dict[str, Any]:
        """Returns the environment, the agents and the dataset for the report of the run."""
        return {
            "environment": "" if self.environment is None else environment_name(self.environment),
            "agents": {agent["role"]: agent["base"] or "" for agent in self.team.summary()},
            "dataset": describe_dataset(self.train_dataset),
        }

    def _begin_training(self) -> None:
        # Random numbers drawn after the trainer was created, for example by loading another team or by an evaluation,
        # must not change the run. A resumed run restores its generators after this
        set_seed(self.args.seed, device_specific=True)
        super()._begin_training()

    # Evaluation

    def collaborate(self, items: Sequence[dict], num_episodes: int = 1) -> list[list[Turn]]:
        """
        Plays episodes of the environment with the current team, without training on them. Under ZeRO-3, every process
        must call this method, each with its own items or with none.

        Args:
            items (`Sequence[dict]`): Rows of the environment's dataset.
            num_episodes (`int`, *optional*, defaults to `1`): Number of episodes sampled per item.

        Returns:
            `list[list[Turn]]`: The turns of each episode. Episode e of item i is entry `i * num_episodes + e`.

        Raises:
            ValueError: The trainer has no environment.
        """
        if self.environment is None:
            raise ValueError("To play episodes, pass the task's `environment` when the trainer is created.")
        with self.team.evaluating(), temporarily_set(self.generator, synchronized=False):
            stream = f"collaborate/{torch.randint(2**62, ())}"  # other draws at every call
            return turns_of_episodes(self._play_episodes(list(items), num_episodes, stream))

    def _play_episodes(self, items: list[dict], num_episodes: int, stream: str, first: int = 0) -> list[list[Node]]:
        """
        Plays episodes without training on them. Returns the nodes of every turn. `first`: the number of the first
        item.
        """
        raise NotImplementedError

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self._num_evaluated = 0
        return super().evaluation_loop(*args, **kwargs)

    def _play_evaluation(self, items: list[dict], copies: int = 1) -> list[list[Node]]:
        """Plays an episode for each item of an evaluation's batch. The dataloader returns each item `copies` times."""
        first = self._num_evaluated + self.accelerator.process_index * len(items)
        self._num_evaluated += self.accelerator.num_processes * len(items)
        with fail_together(self.accelerator):
            return self._play_episodes(without_repeated(self.accelerator, items, copies), 1, "evaluation", first)

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        if isinstance(eval_dataset, dict):  # as in `Trainer`; DPOTrainer would not come back here for each dataset
            metrics = {}
            for name, dataset in eval_dataset.items():
                metrics.update(self.evaluate(dataset, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        with self._without_traces(), temporarily_set(self, _eval_prefix=metric_key_prefix):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        with self._without_traces():
            return super().predict(*args, **kwargs)

    @contextlib.contextmanager
    def _without_traces(self) -> Iterator[None]:
        """Restores the metrics and the team's mode after an evaluation, even if it fails."""
        training = self.team.training
        self._evaluated = []
        try:
            yield
        finally:
            self._metrics["eval"].clear()
            self.team.train(training)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # TRL's trainers put "eval_" before their metrics. With several evaluation sets, the name of the set follows
        if self._eval_prefix.startswith("eval_"):
            name = self._eval_prefix.removeprefix("eval_")
            named = {f"{name}_{key}": values for key, values in self._metrics["eval"].items()}
            self._metrics["eval"] = defaultdict(list, named)
        with temporarily_set(integration_utils, rewrite_logs=tracker_names):
            super().log(logs, start_time)

    # Optimizer

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        rates = self._learning_rates()
        if rates:
            owners = self._trained_parameters()
            owner = {parameter: name for name, parameters in owners.items() for parameter in parameters}
            groups, optimizer.param_groups = optimizer.param_groups, []
            for group in groups:
                for name in (*owners, None):  # `None`: parameters that belong to no agent
                    parameters = [parameter for parameter in group["params"] if owner.get(parameter) == name]
                    rate = group["lr"] if name is None else rates.get(name, group["lr"])
                    if parameters:  # a rate may be a tensor, which optimizers that need one make again from the number
                        optimizer.add_param_group({**group, "params": parameters, "lr": float(rate)})
        return optimizer

    def _learning_rates(self) -> dict[str, float]:
        """Returns the learning rates that differ from `learning_rate`, by the names in `_trained_parameters`."""
        return self.args.agent_learning_rates or {}

    def _trained_parameters(self) -> dict[str, list[torch.nn.Parameter]]:
        """Returns the trained parameters of each agent and of other trained parts, by name."""
        return {role: self.team.agent_parameters(role) for role in self.team.trained_roles}

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: float | torch.Tensor | None = None) -> Any:
        total = super()._get_grad_norm(model, grad_norm)
        if self.accelerator.distributed_type != DistributedType.DEEPSPEED:  # its engine does not expose the gradients
            # The gradients are already clipped: all were multiplied by one factor
            limit = self.args.max_grad_norm
            factor = max(1.0, float(total) / limit) if limit > 0 else 1.0
            for name, parameters in self._trained_parameters().items():
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                norm = factor * torch.nn.utils.get_total_norm(gradients).item()
                prefix = f"agents/{name}" if name in self.team.roles else name
                self._metrics["train"][f"{prefix}/grad_norm"].append(norm)
        return total

    # The reference policy is the initial policy of every agent. A LoRA team contains it: its bases, or copies of
    # adapters that were trained before. For any other team, it is a frozen copy, `ref_model`

    def _make_reference(self) -> AgentTeam | None:
        """Stores the initial policy. Returns a copy of the team, or `None` if the team itself stores the reference."""
        if self.team.form != "lora":
            return self.team.frozen_copy()
        if self.args.sync_ref_model:
            raise ValueError(
                "`sync_ref_model` updates a separate reference model, but the reference of a LoRA team is its own "
                "base. Leave it False, or train agents without adapters."
            )
        self.team.keep_reference()
        return None

    def _set_up_reference(self, reference: AgentTeam | None, temperature: float = 1.0) -> None:
        """
        Prepares the copy that `_make_reference` returned. A subclass calls this after it initializes the TRL trainer.
        """
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
        """Yields a wrapped team whose agents compute with their reference policies within the block."""
        with torch.no_grad(), self.team.evaluating(), self.accelerator.autocast():
            if self.team.form == "lora":
                with self.team.as_reference():
                    yield self.model_wrapped
            else:
                yield self.ref_model

    # The router loss of mixtures of experts over a whole batch, see `models.router_loss`. First, the load of the
    # experts is counted over the batch. Then the loss is a sum over micro-batches and processes

    @torch.no_grad()
    def _expert_load(self, role: str, chunks: Iterable[dict[str, Any]]) -> torch.Tensor:
        """
        Computes the load of an agent's experts over the batch of all processes. `chunks` are the arguments of its
        forwards.
        """
        sent = 0.0
        with self.team.evaluating(), self.accelerator.autocast():
            for inputs in chunks:
                sent = sent + self.model_wrapped(team_inputs={role: inputs})[role].aux_loss[0]
        experts_per_token = self.team.agents[role].config.get_text_config().num_experts_per_tok
        return expert_load(self.accelerator.reduce(sent, "sum"), experts_per_token)

    def _router_loss(self, role: str, expert_sums: torch.Tensor) -> torch.Tensor:
        """
        Computes the part of a micro-batch in an agent's router loss, without the coefficient. `expert_sums`: the
        output's `aux_loss`.
        """
        return self._expert_loads[role] @ expert_sums[1]

    # Failures

    def _abort_with_report(self, problem: str, **records: list[dict]) -> NoReturn:
        """Ends the run with an error, after it has written the items and texts that caused it to the output folder."""
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"failure_step{self.state.global_step}_process{self.accelerator.process_index}.json"
        report = {"problem": problem, "agents": list(self.team.roles), **records}
        path.write_text(json.dumps(report, indent=2, default=repr) + "\n")
        raise FloatingPointError(f"{problem} at step {self.state.global_step}. Items and completions are in {path}.")

    # Saving and loading the team: `team.json`, and one standard folder per agent

    def _run_settings(self) -> dict[str, Any]:
        return describe_run(self._name, self.team.roles, self.team, self.train_dataset, self.args)

    def _frozen_weights(self) -> list[torch.nn.Parameter]:
        frozen = [parameter for parameter in self.team.parameters() if not parameter.requires_grad]
        reference = () if self.ref_model is None or self.args.sync_ref_model else self.ref_model.parameters()
        return [*frozen, *reference]

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if not self.args.should_save:
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        with writing("The team", folder):
            self.team.save_pretrained(folder, state_dict)
            torch.save(self.args, folder / "training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        self.team.load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            self.team.load_weights(self.state.best_model_checkpoint)


def warn_about_dropout(team: AgentTeam) -> None:
    """Warns if dropout makes the update inexact, or if a `lora_dropout` has no effect."""
    if team.uses_dropout:
        logger.warning(
            "`disable_dropout=False`: the update has dropout and the sampling has none, so the update differs from "
            "its formula and depends on how the rows are split into micro-batches."
        )
    elif team.has_adapters:
        roles = [role for role in team.adapted_roles if team.policies[role].peft_config[role].lora_dropout > 0]
        if roles:
            logger.warning(
                f"The `lora_dropout` of {', '.join(roles)} has no effect: the update is computed without dropout, "
                "because the completions are sampled without dropout. `disable_dropout=False` enables it."
            )


def check_call(trainer: type[TeamTrainerMixin], args: tuple, kwargs: dict[str, Any]) -> None:
    """
    Raises a `TypeError` with the replacement for an argument of TRL trainers of one model or a configuration of
    another algorithm.
    """
    for name, advice in INSTEAD.items():
        if name in kwargs:
            raise TypeError(f"`{trainer.__name__}` has no argument `{name}`: {advice}.")
    team = args[0] if args else kwargs.get("team")
    if (args or "team" in kwargs) and not isinstance(team, AgentTeam):
        raise TypeError(f"`team` is {show(team)}, not an `AgentTeam`: {INSTEAD['model']}.")
    names = inspect.getfullargspec(trainer.__init__).args
    given = {**dict(zip(names, (None, *args), strict=False)), **kwargs}
    value = given.get("args")
    if value is not None and not isinstance(value, trainer._config_class):
        raise TypeError(f"`args` is a `{type(value).__name__}`: give a `{trainer._config_class.__name__}`.")
    if value is not None and value.rounds_stochastically and (given.get("optimizers") or (None,))[0] is not None:
        raise ValueError("`bf16_stochastic_round` has no effect on the optimizer in `optimizers`: leave it out.")


def check_agent_settings(team: AgentTeam, args: TeamConfig) -> None:
    """Checks that settings of single agents fit the team."""
    if args.agent_learning_rates and not set(args.agent_learning_rates) <= set(team.roles):
        raise ValueError(
            f"`agent_learning_rates` has the roles {sorted(args.agent_learning_rates)}, which must be roles of the "
            f"team: {team.roles}."
        )
    if args.agent_learning_rates and team.has_shared_weights:
        raise ValueError(
            "`agent_learning_rates` needs agents with separate weights, but the agents of this team share theirs. Set "
            "one `learning_rate` instead."
        )


def check_devices(team: AgentTeam, args: TeamConfig) -> None:
    """Checks that every agent of the team can have a device of its own."""
    if args.devices is None:
        return
    if set(args.devices) != set(team.roles):
        raise ValueError(
            f"`devices` has the roles {list(args.devices)}; it must have those of the team: {list(team.roles)}."
        )
    if team.form != "full" or args.critic_names(team.trained_roles):
        raise ValueError(
            "`devices` is for agents with a model each and without critics: leave it out for LoRA teams, shared "
            "weights and actor-critic methods."
        )


def router_loss_coefs(team: AgentTeam, args: TeamConfig) -> dict[str, float]:
    """
    Returns the coefficient of the router loss of each trained agent that has such a loss. Raises `ValueError` if it
    has no effect.
    """
    agents = {role: team.agents[role] for role in team.trained_roles if has_routers(team.agents[role])}
    if args.router_aux_loss_coef and not agents:
        raise ValueError(
            f"`router_aux_loss_coef` is {args.router_aux_loss_coef}, but no trained agent is a mixture of experts "
            "that returns its router logits: leave it out."
        )
    coefs = {role: router_loss_coef(agent.config, args.router_aux_loss_coef) for role, agent in agents.items()}
    coefs = {role: coef for role, coef in coefs.items() if coef != 0.0}
    if coefs and args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            f"The router loss of {', '.join(coefs)} has no gradient through reentrant checkpointing. Set "
            "`use_reentrant` in `gradient_checkpointing_kwargs` to False. LoRA under ZeRO-3 needs reentrant "
            "checkpointing: set `gradient_checkpointing` to False there. Or train without this loss: "
            "`router_aux_loss_coef=0.0`."
        )
    return coefs


# Several processes


def without_repeated(accelerator: Accelerator, rows: list[Any], copies: int = 1) -> list[Any]:
    """
    Drops the rows that accelerate has repeated, possibly all, see [`num_own_rows`]. The sampler returns each row
    `copies` times.
    """
    number = copies * len(accelerator.gradient_state.active_dataloader.dataset)
    return rows[: num_own_rows(accelerator, len(rows), number)]


def num_own_rows(accelerator: Accelerator, num_rows: int, length: int) -> int:
    """
    Returns how many rows of this process's latest batch are not repeated. These are the first of its `num_rows` rows.
    accelerate repeats rows to fill the last batches of all processes. `length`: the number of rows of the dataset,
    with the copies that the sampler makes.
    """
    remainder = length % (num_rows * accelerator.num_processes)
    if accelerator.num_processes == 1 or not accelerator.gradient_state.end_of_dataloader or remainder == 0:
        return num_rows
    # In the last batches, the first rows count, one process after the other
    return min(num_rows, max(0, remainder - accelerator.process_index * num_rows))


def forget_engine() -> None:
    """
    Resets accelerate, so that the next trainer can configure DeepSpeed. accelerate keeps its first configuration, and
    refuses others.
    """
    AcceleratorState._reset_state()


@contextlib.contextmanager
def without_sharding(args: TrainingArguments) -> Iterator[None]:
    """Loads full (unsharded) models inside the block, even under ZeRO-3: a collection samples on each rank alone."""
    plugin = args.deepspeed_plugin
    if plugin is not None:  # while it is registered, transformers shards the models that it loads
        unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if plugin is not None:
            plugin.set_deepspeed_weakref()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_distribution(accelerator: Accelerator) -> None:
    """
    Raises `ValueError` if the run is distributed in a way that cannot work, or that accelerate has silently replaced.
    """
    # The environment variables name the requested engine. On the CPU, accelerate may silently use another one
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        raise ValueError(
            "FSDP cannot train a team: it gathers weights at every forward pass, also during generation, so processes "
            "whose rollout trees differ would wait for each other forever. Use ZeRO-3, which shards the same state: "
            "accelerate_configs/zero3.yaml."
        )
    uses_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and not uses_deepspeed:
        raise ValueError(
            f"DeepSpeed was requested, but accelerate runs {accelerator.distributed_type.value} instead. If "
            "ACCELERATE_USE_CPU is set, unset it: DeepSpeed detects the CPU by itself."
        )
    if uses_deepspeed:
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if zero["stage"] == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save", False):
            raise ValueError(
                "DeepSpeed's `stage3_gather_16bit_weights_on_model_save` (accelerate: `zero3_save_16bit_model`) is "
                "not true. Set it to true: without it, a saved team would have no weights."
            )

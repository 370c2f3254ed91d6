"""Makes a trainer of TRL train a team, in one process or several."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from datasets import Dataset
from huggingface_hub import CommitInfo
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PreTrainedModel
from transformers.integrations import integration_utils, is_deepspeed_zero3_enabled
from transformers.integrations.liger import apply_liger_kernel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput
from transformers.utils import logging
from trl.models import prepare_deepspeed, unwrap_model_for_generation
from trl.models.utils import add_hooks, remove_hooks
from trl.trainer.utils import add_fused_lm_head

from trl_multiagent.environments.base import Turn
from trl_multiagent.environments.frames import shows_task
from trl_multiagent.environments.task_errors import show
from trl_multiagent.jobs.distributed import error_barrier, fail_together
from trl_multiagent.models.grouped_lora import Stacked
from trl_multiagent.models.pretrained import has_routers, temporarily_set
from trl_multiagent.models.shared_prompts import takes_masks
from trl_multiagent.rollout.sampler import TransformersGenerator
from trl_multiagent.rollout.tree import Trees, known, mean_of_known, turns_of_episodes
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.checkpoints import (
    CheckpointCallback,
    CheckpointMixin,
    describe_run,
    other_adapters,
    writing,
)
from trl_multiagent.trainers.base.metrics import RolloutTotals, tracker_names
from trl_multiagent.trainers.base.team_config import TeamConfig, check_trained_weights


logger = logging.get_logger(__name__)

BUCKETS = 20  # reductions of the gradients in a step under DeepSpeed
MOST_COMPILED = 64  # forms of a layer, such as with another adapter


class CommonTrainerMixin(CheckpointMixin):
    """
    Makes a trainer evaluate, predict and train in any order.

    If accelerate has prepared a model for an evaluation, it does not wrap the model for a training. Without the
    wrapper, processes do not share gradients, and each trains its own model. So evaluations here do not prepare the
    model.
    """

    deepspeed: Any  # the engine; `None` before a training
    _evaluated: RolloutTotals  # of the batches of the current evaluation so far
    _was_given_optimizer = False

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Without a seed, each process takes one from its random numbers, which differ between processes after a
        # training
        config = self.accelerator.dataloader_config
        if config.data_seed is None:
            config.data_seed = self.args.seed

    def _prepare_for_training(self, *args: Any) -> tuple[torch.nn.Module, DataLoader]:
        if self.is_deepspeed_enabled and self.deepspeed is not None:  # a second training makes an engine of its own
            if self._was_given_optimizer:
                raise ValueError("Under DeepSpeed, `optimizers` are for one training: make another trainer.")
            self.deepspeed, self.model_wrapped, self.optimizer, self.lr_scheduler = None, self.model, None, None
        self._was_given_optimizer = self.optimizer is not None
        if self._was_given_optimizer and self.args.rounds_stochastically:
            raise ValueError("`bf16_stochastic_round` has no effect on the optimizer in `optimizers`: leave it out.")
        return super()._prepare_for_training(*args)

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
                output = super().evaluation_loop(*args, **kwargs)
        finally:
            if self.deepspeed is not None and not had_engine:  # it has no optimizer; the training makes its own
                self.accelerator.free_memory()
                self.deepspeed, self.model_wrapped = None, self.model
        # TRL would add the metrics when they are logged, and put "eval_" before them, whatever the prefix is
        for name, values in self._metrics["eval"].items():
            mean = mean_of_known(values) if known(values) else None  # as TRL; NaN is not in JSON
            output.metrics[f"{kwargs['metric_key_prefix']}_{name}"] = mean
        self._metrics["eval"].clear()
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._without_traces():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        with self._without_traces():
            return super().predict(*args, **kwargs)

    @contextmanager
    def _without_traces(self) -> Iterator[None]:
        """Restores the metrics and the model's mode, on which logs depend, after an evaluation, even if it fails."""
        training = self.model.training
        self._evaluated = RolloutTotals()
        try:
            yield
        finally:
            self._metrics["eval"].clear()
            self.model.train(training)


class TeamTrainerMixin(CommonTrainerMixin):
    """
    Makes a TRL trainer of causal language models, such as `GRPOTrainer` or `DPOTrainer`, train an [`AgentTeam`].

    The mixin precedes the TRL trainer in the bases, and [`TeamConfig`] precedes the TRL configuration in the bases of
    the configuration class.

    A subclass calls `_prepare_team` before it initializes the TRL trainer, and `_set_up_agents` after that. In
    between, it calls `_fuse_heads` if the TRL trainer has patched the forward of the team with `add_fused_lm_head`, as
    most do. A subclass can override `_run_settings`, the settings that a checkpoint must match, and `_card_facts` and
    `_card_settings`, the contents of the model card.
    """

    in_place_of = {
        "model": "give `team=AgentTeam.from_pretrained(model, roles)`.",
        "peft_config": "give `team=AgentTeam.from_pretrained(model, roles, peft_config=...)`.",
        "processing_class": "the team has a tokenizer for each agent.",
        "reward_funcs": "give `environment=FunctionEnvironment(prompts, reward_funcs)`, with a prompt for each role.",
        "tools": "give `environment=tool_workflow(...)`.",
    }
    team: AgentTeam
    environment: Any = None  # the `Environment` that an evaluation plays
    _card_settings: list[str] = []  # training arguments to show in the model card
    generator: Any  # the [`TrainerGenerator`] or [`VLLMGenerator`] of this trainer
    _metrics: dict[str, defaultdict[str, list[float]]]
    _router_loss_coefs: dict[str, float]  # by role, for agents that have a router loss
    _expert_loads: dict[str, torch.Tensor]  # by role, in the current batch
    _config_class: type[TeamConfig] = TeamConfig  # class of the default configuration
    _trains_critics = False
    _eval_prefix: str  # prefix of the metrics of the current evaluation

    def create_accelerator_and_postprocess(self) -> None:
        with temporarily_set(self.args, torch_compile_backend=None):  # `_prepare_team` has compiled what it names
            super().create_accelerator_and_postprocess()

    def _checked(self, team: AgentTeam, args: TeamConfig | None) -> Any:
        """Checks the types of the team and of the configuration. Returns the latter, by default a new one."""
        if not isinstance(team, AgentTeam):
            raise TypeError(
                f"`team` is {show(team)}, not an `AgentTeam`: `AgentTeam.from_pretrained(name, roles)` loads one, "
                "`AgentTeam(models, tokenizers)` takes models."
            )
        if args is None:
            return self._config_class(f"{team.roles[-1]}-{self._name}")
        if not isinstance(args, self._config_class):
            raise TypeError(f"`args` is a `{type(args).__name__}`: give a `{self._config_class.__name__}`.")
        return args

    def _prepare_team(self, team: AgentTeam, args: TeamConfig) -> None:
        """
        Checks and applies the arguments about the agents. A subclass calls this before it initializes the TRL trainer.
        """
        rates = args.agent_learning_rates or {}
        if not {*rates} <= {*team.roles}:
            raise ValueError(f"`agent_learning_rates` has the roles {sorted(rates)}; the team has {list(team.roles)}.")
        if rates and team.has_shared_weights:
            raise ValueError(
                "`agent_learning_rates` needs agents with separate weights, but the agents of this team share theirs. "
                "Set one `learning_rate` instead."
            )
        if team.critics is not None and not self._trains_critics:
            raise ValueError(
                "The team has the critics of an earlier trainer, which this one does not train. Save the team, and "
                "load its agents with `AgentTeam.from_pretrained`."
            )
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = False  # every backward pass reaches every trained agent
        self.team = team
        # Trainer writes this into the configuration of the active agent, which is saved
        args.use_cache = getattr(team.config, "use_cache", False)
        if args.devices is not None:
            self._place(team, args)
        team.freeze(args.frozen_agents or ())
        check_trained_weights(team.named_parameters(), args)
        for role in team.trained_roles:
            agent = team.agents[role]
            if agent.base_model is agent:
                raise ValueError(
                    f"{role!r} cannot be trained: {type(agent).__name__} of transformers names no backbone, which the "
                    "log-probabilities of TRL need."
                )
            if not all(x.is_floating_point() for x in team.agent_parameters(role)):
                raise ValueError(
                    f"The weights of agent {role!r} are quantized, so they cannot be trained: load it with a "
                    "`peft_config`."
                )
        team.uses_dropout = not args.disable_dropout
        if args.torch_compile:
            if team.has_adapters and args.gradient_checkpointing:
                raise ValueError(
                    "`torch_compile` compiles no LoRA agents whose activations are recomputed: set "
                    "`gradient_checkpointing: false`."
                )
            # To torch, all layers are one function, of which it compiles at most eight forms, of earlier trainers too
            torch.compiler.reset()
            torch._dynamo.config.recompile_limit = MOST_COMPILED
        for model in team.base_models:
            if model._supports_attention_backend and not takes_masks(model):
                logger.warning(
                    f"`attn_implementation` {model.config._attn_implementation!r} takes no masks: the update computes "
                    "shared prompts once for each completion, and no CUDA graph samples tokens. 'sdpa' does both."
                )
            if args.use_liger_kernel:  # its norms, rotary embeddings and activations, but not its losses
                kernels = args.liger_kernel_config or {}
                apply_liger_kernel(model, {**kernels, "cross_entropy": False, "fused_linear_cross_entropy": False})
            if args.torch_compile:  # not whole models, which choose an adapter at every forward
                for layer in model.modules():
                    if isinstance(layer, GradientCheckpointingLayer):
                        layer.compile(dynamic=True, backend=args.torch_compile_backend, mode=args.torch_compile_mode)
        if args.deepspeed_plugin is not None:
            # DeepSpeed's own default, 5e8 gradients, needs a buffer of one gigabyte, more than the shards of a
            # small team. transformers' "auto" is the hidden size squared: hundreds of small reductions
            trained = sum(getattr(x, "ds_numel", x.numel()) for x in team.parameters() if x.requires_grad)
            zero = args.deepspeed_plugin.deepspeed_config["zero_optimization"]
            zero.setdefault("reduce_bucket_size", min(500_000_000, max(500_000, trained // BUCKETS)))
        if team.has_adapters and args.gradient_checkpointing:
            team.enable_input_require_grads()
            if args.zero_stage == 3:
                # As in TRL: under ZeRO-3, partly frozen layers need the reentrant implementation of checkpointing
                kwargs = args.gradient_checkpointing_kwargs or {}
                args.gradient_checkpointing_kwargs = {**kwargs, "use_reentrant": True}
        self._router_loss_coefs, self._expert_loads = router_loss_coefs(team, args), {}

    def _place(self, team: AgentTeam, args: Any) -> None:
        """Moves the agents to their devices. Raises `ValueError` if an agent cannot have one of its own."""
        if set(args.devices) != set(team.roles):
            raise ValueError(
                f"`devices` has the roles {list(args.devices)}; it must have the team's: {list(team.roles)}."
            )
        if team.form != "full" or args.critic_names(team.trained_roles):
            raise ValueError(
                "`devices` is for agents with a model each and without critics: leave it out for LoRA teams, shared "
                "weights and actor-critic methods."
            )
        team.place({role: torch.device(args.device.type, number) for role, number in args.devices.items()})

    def _set_up_agents(self) -> None:
        """Checks the accelerator and adds callbacks. A subclass calls this after it initializes the TRL trainer."""
        check_distribution(self.accelerator)
        stops_early = any(isinstance(callback, EarlyStoppingCallback) for callback in self.callback_handler.callbacks)
        if stops_early and (self.args.metric_for_best_model is None or self.args.eval_strategy == "no"):
            raise ValueError(
                "`EarlyStoppingCallback` needs `eval_strategy` and a `metric_for_best_model` like 'reward'."
            )
        has_rates = self.args.agent_learning_rates and self.lr_scheduler is not None
        if self.optimizer is not None and (self._trains_critics or has_rates):
            what = "Critics need" if self._trains_critics else "`agent_learning_rates` beside a scheduler needs"
            raise ValueError(f"{what} an optimizer that the trainer makes: leave `optimizers` out.")
        self.add_callback(CheckpointCallback(self))
        from trl_multiagent.report.run_report import report_run

        report_run(self)

    def _fuse_heads(self, *outputs: str, temperature: float = 1.0) -> None:
        """
        Has the forward of each agent return log-probabilities, and other `outputs` of `add_fused_lm_head`. The TRL
        trainer has patched the forward of the team, as if it were a single model.
        """
        del self.team.__dict__["forward"]
        for model in self.team.base_models:
            add_fused_lm_head(model, temperature=temperature, outputs=outputs)
        if not self.is_deepspeed_enabled:  # which places the weights later
            self._check_heads(temperature)

    def _check_heads(self, temperature: float) -> None:
        """
        Raises `ValueError` if log-probabilities that TRL computes from the output embeddings are not those of an
        agent's own logits: some models have a layer before them, or change the logits after them.
        """
        for agent in {self.team.agents[role] for role in self.team.trained_roles}:
            ids = torch.arange(6, device=agent.get_output_embeddings().weight.device)[None]
            with self._without_training(), torch.compiler.set_stance("force_eager"):
                found = agent(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
                logits = agent(input_ids=ids).logits[:, :-1]
            own = (logits.float() / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            rounding = (0.01 if logits.dtype == torch.float32 else 0.5) / min(1.0, temperature)
            if (found - own).abs().max() > rounding:
                raise ValueError(
                    f"{type(agent).__name__} cannot be trained: TRL computes log-probabilities from output embeddings "
                    "and hidden states alone, and this model computes its logits otherwise."
                )

    @shows_task
    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        # Trainer applies these kernels to a single model. The agents have them already
        with temporarily_set(self.args, use_liger_kernel=False):
            return super().train(*args, **kwargs)

    def _begin_training(self) -> None:
        # Random numbers drawn after the trainer was created, for example by loading another team or by an evaluation,
        # must not change the run. A resumed run restores its generators after this
        set_seed(self.args.seed, device_specific=True)
        super()._begin_training()

    # Evaluation

    @shows_task
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

    def _play_episodes(self, items: list[dict], num_episodes: int, stream: str, first: int = 0) -> Trees:
        """
        Plays episodes without training on them. Returns the nodes of every turn. `first`: the number of the first
        item.
        """
        raise NotImplementedError

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self._num_evaluated, self._eval_prefix = 0, kwargs["metric_key_prefix"]
        return super().evaluation_loop(*args, **kwargs)

    def _play_evaluation(self, items: list[dict], copies: int = 1) -> Trees:
        """Plays an episode for each item of an evaluation's batch. The dataloader returns each item `copies` times."""
        first = self._num_evaluated + self.accelerator.process_index * len(items)
        self._num_evaluated += self.accelerator.num_processes * len(items)
        with fail_together(self.accelerator):
            own = items[: num_own_rows(self.accelerator, len(items), copies)]
            return self._play_episodes(own, 1, "evaluation", first)

    @shows_task
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
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def log(self, *args: Any, **kwargs: Any) -> None:
        with temporarily_set(integration_utils, rewrite_logs=tracker_names):
            super().log(*args, **kwargs)

    # Optimizer

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        rates = self._learning_rates()
        if rates:
            owners = self._trained_parameters()
            owner = {parameter: name for name, parameters in owners.items() for parameter in parameters}
            groups, optimizer.param_groups = optimizer.param_groups, []
            for group in groups:
                for name in (*owners, ""):  # the last: parameters that belong to no agent
                    parameters = [parameter for parameter in group["params"] if owner.get(parameter, "") == name]
                    if parameters:  # a rate may be a tensor, which optimizers that need one make again from the number
                        rate = float(rates.get(name, group["lr"]))
                        optimizer.add_param_group({**group, "params": parameters, "lr": rate})
        return optimizer

    def _learning_rates(self) -> dict[str, float]:
        """Returns the learning rates that differ from `learning_rate`, by the names in `_trained_parameters`."""
        return self.args.agent_learning_rates or {}

    def _trained_parameters(self) -> dict[str, list[torch.nn.Parameter]]:
        """Returns the trained parameters of each agent and of other trained parts, by name."""
        return {role: self.team.agent_parameters(role) for role in self.team.trained_roles}

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        total = super()._get_grad_norm(*args, **kwargs)
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

    @contextmanager
    def _without_training(self) -> Iterator[None]:
        """Makes the team compute without dropout and gradients within the block."""
        with torch.no_grad(), self.team.evaluating(), self.accelerator.autocast():
            yield

    @contextmanager
    def _computing_as_reference(self) -> Iterator[torch.nn.Module]:
        """Yields a wrapped team. Within the block, its agents compute with their reference policies."""
        with self._without_training():
            if self.team.form == "lora":
                with self.team.as_reference():
                    yield self.model_wrapped
            else:
                yield self.ref_model

    # The router loss of mixtures of experts over a whole batch, see `models.router_loss`. First, the load of the
    # experts is counted over the batch. Then the loss is a sum over micro-batches and processes: of this load, times
    # the second sums in `aux_loss` of an output

    def _expert_load(self, role: str, chunks: Iterable[dict[str, Any]]) -> torch.Tensor:
        """
        Computes [`~models.router_loss.factors_of`] for an agent, over the batch of all processes. `chunks`: the
        arguments of its forwards.
        """
        from trl_multiagent.models.router_loss import factors_of

        sent = 0.0
        with self._without_training():
            for inputs in chunks:
                sent = sent + self.model_wrapped(team_inputs={role: inputs})[role].aux_loss[0]
        experts_per_token = self.team.agents[role].config.get_text_config().num_experts_per_tok
        return factors_of(self.accelerator.reduce(sent, "sum"), experts_per_token)

    # Saving and loading the team: `team.json`, and one standard folder per agent

    def _run_settings(self) -> dict[str, Any]:
        return describe_run(self._name, self.team.roles, self.team, self.train_dataset, self.args)

    def _frozen_weights(self) -> list[torch.nn.Parameter]:
        frozen = [parameter for parameter in self.team.parameters() if not parameter.requires_grad]
        reference = () if self.ref_model is None else self.ref_model.parameters()
        return [*frozen, *reference]

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if not self.args.should_save:
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        with writing("The team", folder, "" if self._saving else self._last_complete()):
            self.team.save_pretrained(folder, state_dict)
            torch.save(self.args, folder / "training_args.bin")
        if not self._saving:
            print(f"Saved team       {folder}", flush=True)

    def _load_from_checkpoint(self, folder: str, *args: Any) -> None:
        self.team.load_weights(folder)

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            self.team.load_weights(self.state.best_model_checkpoint)
        if self.is_world_process_zero():
            print(f"Best checkpoint  {self.state.best_model_checkpoint}", flush=True)

    # The Hub: `push_to_hub` and every `hub_strategy` push a team

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        # The trainer calls this when it is created. Without the check, missing write access to an existing public
        # repository would show only at the first upload, possibly at the end of the training
        from trl_multiagent.hub import access_error_with_advice, check_write_access
        from trl_multiagent.trainers.base.hub import hub_name

        with access_error_with_advice(hub_name(self)):
            super().init_hf_repo(token, private)
            if self.is_world_process_zero():
                check_write_access(self.hub_model_id, token or self.args.hub_token, self.args.hub_revision)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """
        Writes the model card of the team, `README.md`, to the output folder.

        Args:
            model_name (`str`, *optional*): Name of the team.
            dataset_name (`str`, *optional*): Id on the Hub of the training dataset.
            tags (`str` or `list[str]`, *optional*): Additional tags.
        """
        if not self.is_world_process_zero() or not self._may_change_files():
            return
        from trl_multiagent.trainers.base.hub import write_card

        write_card(self, model_name, dataset_name, tags)

    def _card_facts(self) -> dict[str, Any]:
        """Returns the numbers about the run that the model card shows, by name."""
        return {"optimizer steps": self.state.global_step}

    def push_to_hub(self, *args: Any, **kwargs: Any) -> CommitInfo | Future | None:
        """
        Pushes the team as [`~transformers.Trainer.push_to_hub`] does. Keyword arguments go to
        [`~TeamTrainerMixin.create_model_card`].
        """
        from trl_multiagent.trainers.base.hub import pushing

        with pushing(self):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        from trl_multiagent.trainers.base.hub import push_checkpoint

        push_checkpoint(self, checkpoint_folder, super()._push_from_checkpoint)

    def _may_change_files(self) -> bool:
        """
        Returns whether no background upload reads the output folder. With `hub_always_push`, waits for the upload to
        end.
        """
        if self.hub_model_id is None:
            return True
        if self.args.hub_always_push:
            self._finish_current_push()
        return self.push_in_progress is None or self.push_in_progress.is_done()


class TrainerGenerator(TransformersGenerator):
    """
    Samples with the team of a trainer. DeepSpeed may have divided its weights among processes. `gathers`: whether
    ZeRO-3 gathers them. The other arguments are the same as in [`TransformersGenerator`].
    """

    synchronized = True  # whether all processes sample at the same time, so that all end if one fails

    def __init__(
        self,
        trainer: TeamTrainerMixin,
        arguments: dict[str, Any],
        gathers: bool = True,
        **options: Any,
    ):
        super().__init__(trainer.team, arguments, seed=trainer.args.seed, **options)
        self.trainer = trainer
        self.gathers = gathers

    @contextmanager
    def computing(self, roles: list[str]) -> Iterator[tuple[PreTrainedModel, Stacked | None]]:
        trainer = self.trainer
        if self.synchronized and is_deepspeed_zero3_enabled():
            # ZeRO-3 gathers weights next, and a failed process cannot take part in that. Elsewhere, processes may make
            # different numbers of calls
            error_barrier(trainer.accelerator)
        with (
            trainer.accelerator.autocast(),
            super().computing(roles) as sampling,
            self._gathering(roles),
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=False,
                generation_kwargs=self.arguments,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ),
        ):
            yield sampling

    @contextmanager
    def _gathering(self, roles: list[str]) -> Iterator[None]:
        """
        Gathers the weights of agents on one model within the block, without other agents' adapters. TRL would gather
        the whole team for each agent.
        """
        if not self.gathers or not is_deepspeed_zero3_enabled():
            yield
            return
        import deepspeed

        policy = self.trainer.team.policies[roles[0]]
        others = {id(parameter) for parameter in other_adapters(policy, roles)}
        with deepspeed.zero.GatheredParameters([x for x in policy.parameters() if id(x) not in others]):
            remove_hooks(self.trainer.model_wrapped)
            yield
            add_hooks(self.trainer.model_wrapped)


def router_loss_coefs(team: AgentTeam, args: TeamConfig) -> dict[str, float]:
    """
    Returns the coefficient of the router loss of each trained agent that has such a loss: the given one, else the one
    in the model's configuration, as in GRPOTrainer. Raises `ValueError` if it has no effect.
    """
    name, given = "router_aux_loss_coef", args.router_aux_loss_coef
    agents = {role: team.agents[role] for role in team.trained_roles if has_routers(team.agents[role])}
    if given and not agents:
        raise ValueError(
            f"`{name}` is {given}, but no trained agent is a mixture of experts that returns its router logits: leave "
            "it out."
        )
    configs = {role: agent.config.get_text_config() for role, agent in agents.items()}
    coefs = {role: getattr(config, name, 0.0) if given is None else given for role, config in configs.items()}
    coefs = {role: coef for role, coef in coefs.items() if coef != 0.0}
    if coefs and args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            f"The router loss of {', '.join(coefs)} has no gradient through reentrant checkpointing. Set "
            "`use_reentrant` in `gradient_checkpointing_kwargs` to False. LoRA under ZeRO-3 needs reentrant "
            "checkpointing: set `gradient_checkpointing` to False there. Or train without this loss: "
            "`router_aux_loss_coef=0.0`."
        )
    return coefs


def eval_datasets(eval_dataset: Dataset | dict[str, Dataset] | None) -> list[Dataset]:
    """Returns the sets of an evaluation."""
    if eval_dataset is None:
        return []
    return list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]


# Several processes


def num_own_rows(accelerator: Accelerator, num_rows: int, copies: int = 1) -> int:
    """
    Returns how many rows of this process's latest batch are not repeated, possibly none. These are the first of its
    `num_rows` rows. accelerate repeats rows to fill the last batches of all processes. The sampler returns each row of
    the dataset `copies` times.
    """
    state, processes = accelerator.gradient_state, accelerator.num_processes
    if processes == 1 or not state.end_of_dataloader:
        return num_rows
    loader = state.active_dataloader
    if getattr(loader.batch_sampler, "drop_last", False):  # which the sampler of a resumed epoch lacks
        return num_rows
    remainder = copies * len(loader.dataset) % (num_rows * processes)
    # In the last batches, the first rows count, one process after the other
    own = remainder - accelerator.process_index * num_rows
    return min(num_rows, max(0, own)) if remainder else num_rows


def check_distribution(accelerator: Accelerator) -> None:
    """
    Raises `ValueError` if the run is distributed in a way that cannot work, or that accelerate has silently replaced.
    """
    # The environment variables name the requested engine. On the CPU, accelerate may silently use another one
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        raise ValueError(
            "FSDP cannot train a team: its first version gathers weights at every forward, also during generation, "
            "so processes with different trees would wait for each other forever, and its second one is not "
            "supported. Use ZeRO-3, which shards the same state: accelerate_configs/zero3.yaml."
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

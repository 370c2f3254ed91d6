"""
The base class of all trainers that learn from rollout trees: it samples and scores trees, trains on batches of them,
and evaluates.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader, Sampler
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput, RepeatSampler, repeat_iterable_dataset

from trl_multiagent.environments.base import (
    Environment,
    Outcome,
    ScoringContext,
    check_roles,
    describe_environment,
    scoring,
)
from trl_multiagent.environments.frames import shows_task
from trl_multiagent.environments.task_errors import TaskError, show
from trl_multiagent.folders import COST_FILE, read_json, write_json
from trl_multiagent.jobs.distributed import OtherProcessError, fail_together
from trl_multiagent.limits import check_dataset, explained
from trl_multiagent.models.pretrained import temporarily_set
from trl_multiagent.rollout.sampler import TeamSampler
from trl_multiagent.rollout.tree import ByRole, Node, Trees, grow_trees, judge_nodes, play_episodes
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.batch import (
    Advantages,
    AgentTensors,
    Batch,
    Row,
    agent_tensors,
    collect_rows,
    forward_inputs,
    split_rows,
)
from trl_multiagent.trainers.base.checkpoints import ENVIRONMENT_FILE
from trl_multiagent.trainers.base.loss import policy_loss
from trl_multiagent.trainers.base.metrics import Observer
from trl_multiagent.trainers.base.rollout_config import RolloutConfig
from trl_multiagent.trainers.base.team_trainer import (
    TeamTrainerMixin,
    TrainerGenerator,
    eval_datasets,
)


@explained
class RolloutTrainer(TeamTrainerMixin, GRPOTrainer):
    """
    Base class of the trainers that learn from rollout trees. Each optimizer step samples one batch of trees with the
    current team. With `num_iterations`, a batch is used for that many optimizer steps.

    A subclass defines how returns become advantages ([`~RolloutTrainer.node_advantages`]). It may change the loss of
    an agent ([`~RolloutTrainer.agent_loss`]), and leave rows out of the update ([`~RolloutTrainer.rows_to_train`]).

    It takes the arguments of [`MAGRPOTrainer`]; `args` is a [`RolloutConfig`].

    Raises:
        TypeError: `environment` or `train_dataset` has the wrong type.
        ValueError: The arguments do not fit the team, the environment or the dataset.
    """

    args: RolloutConfig
    _card_settings = """
        num_turns num_generations joint_mode handoff discount reward_scale reward_shift items_per_device
        max_completion_length temperature learning_rate beta seed
    """.split()
    _buffered_inputs: list[Batch]  # the micro-batches of an optimizer step
    _rows: Mapping[str, list] = {}  # that the critics read in the current batch, by critic
    _ahead: Any = None  # samples the next batch during the update, see [`~trainers.base.ahead`]
    _paper: dict[str, str] | None = None

    @shows_task
    def __init__(
        self,
        team: AgentTeam,
        environment: Environment,
        args: RolloutConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        args = self._checked(team, args)
        check_inputs(team, environment, args, train_dataset, eval_dataset)
        self.environment = environment
        self.generated_tokens = 0  # tokens generated in training, over all agents and processes
        self._turns: Trees = []  # the nodes of the last batch, kept for failure reports
        self._has_chosen = not (args.chooses_rows or args.chooses_checkpointing)
        self._prepare_team(team, args)
        if args.chat_template_kwargs is not None:  # saved with the team
            team.chat_template_kwargs = {role: {**args.chat_template_kwargs} for role in team.roles}
        self.args = args
        self.observer = Observer(self)
        if self._router_loss_coefs and args.num_iterations > 1:
            raise ValueError(
                "`num_iterations` above 1 cannot be combined with a router loss: its expert load is computed once, "
                "under the sampling policy. Set `router_aux_loss_coef` to 0.0 or `num_iterations` to 1."
            )
        reference = self._make_reference() if args.beta != 0.0 else None
        from trl_multiagent.report.run_report import watchers

        # GRPOTrainer must not set up a reference model, vLLM and dropout for a single model, and would warn about
        # token-level ratios with "luspo"
        level = "sequence" if args.loss_type == "luspo" else args.importance_sampling_level
        with temporarily_set(
            args,
            beta=0.0,
            use_vllm=False,
            disable_dropout=False,
            importance_sampling_level=level,
            router_aux_loss_coef=None,
        ):
            super().__init__(
                args=args,
                model=team,
                reward_funcs=environment.score,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=team.tokenizers[team.roles[0]],
                callbacks=[*watchers(environment, args), *(callbacks or [])],
                optimizers=optimizers,
            )
        self.log_completions = False  # GRPOTrainer's table has no columns for agents
        self._fuse_heads("log_probs", "entropy", temperature=self.temperature)
        self._set_up_agents()
        self.generator = self._make_generator()
        self.sampler = TeamSampler(team, self.generator, args.use_chat_template, args)
        self._set_up_reference(reference, self.temperature)
        for items in (train_dataset, *eval_datasets(eval_dataset)):
            self.sampler.check_items([*items.take(1)], environment, args.num_turns)
        if args.rollouts_ahead:
            from trl_multiagent.trainers.base.ahead import Ahead

            self._ahead = Ahead(self)

    def _make_generator(self) -> Any:
        args = self.args
        if args.use_vllm:
            from trl_multiagent.trainers.base.vllm import VLLMGenerator

            return VLLMGenerator(self)
        special = ("pad_token_id", "bos_token_id", "eos_token_id")  # the first agent's
        arguments = {name: value for name, value in self.generation_kwargs.items() if name not in special}
        arguments["disable_compile"] = True
        return TrainerGenerator(
            self,
            arguments,
            args.ds3_gather_for_generation,
            token_budget=args.generation_token_budget,
            stop_strings=args.stop_strings,
        )

    # Methods that an algorithm defines

    def advantages(self, turns: Trees) -> Advantages:
        """
        Computes [`~RolloutTrainer.node_advantages`] for the nodes of each turn. Override this if an advantage depends
        on other nodes.
        """
        return [[self.node_advantages(node) for node in nodes] for nodes in turns]

    def node_advantages(self, node: Node) -> dict[str, torch.Tensor]:
        """
        Computes the advantages of every trained agent's completions at a node, of shape `(G,)`, from the node's
        returns.
        """
        raise NotImplementedError

    def agent_loss(self, role: str, outputs: FusedCausalLMOutput, rows: AgentTensors) -> torch.Tensor:
        """
        Computes the loss of agent i on its own completions in one micro-batch, and adds its metrics to the next log
        entry. Here it is

            L_i = mean over rows (items, nodes, siblings g) of  -A_g * sum over tokens t of log pi_i(t),

        and [`~trainers.base.loss`] has further terms, such as the reference penalty.

        Args:
            role (`str`): The agent.
            outputs ([`~trl.trainer.utils.FusedCausalLMOutput`]): The agent's output for the rows: `log_probs` and
                `entropy`.
            rows ([`~trainers.base.batch.AgentTensors`]): The agent's rows.

        Returns:
            `torch.Tensor`: A scalar. The loss of the batch is its sum over micro-batches, averaged over processes.
        """
        computed = policy_loss(outputs.log_probs, outputs.entropy, rows, self.args)
        for name, value in computed.sums.items():
            self.observer.sums[role, name] += value
        return computed.loss

    @property
    def _only_compares_rewards(self) -> bool:
        """Whether a number that is added to all rewards of an item changes no advantage."""
        return False

    def rows_to_train(self, rows: list[Row]) -> list[Row]:
        """Selects the rows of a batch that take part in the update. By default, all do."""
        return rows

    # Overrides of the team mixin

    def _run_settings(self) -> dict[str, Any]:
        return {**super()._run_settings(), **describe_environment(self.environment)}

    def _card_facts(self) -> dict[str, Any]:
        return {**super()._card_facts(), "env steps": self.env_step}

    # Data: a batch has `items_per_device` items, each the root of one tree

    def get_train_dataloader(self) -> DataLoader:
        dataset, size, sampler = self.train_dataset, self.args.items_per_device, self._get_train_sampler
        if isinstance(dataset, IterableDataset):  # in the order of `EpochSampler`
            stream = dataset.shuffle(self.args.seed) if self.shuffle_dataset else dataset
            dataset = repeat_iterable_dataset(stream, 1, size * self.args.world_size, self.num_iterations)
        loader = self._get_dataloader(dataset, "Training", size, sampler_fn=sampler, is_training=True)
        if isinstance(shard := loader.batch_sampler, BatchSamplerShard):
            shard.sampler = shard.batch_sampler.sampler  # where accelerate looks for it in an epoch that is resumed
        return loader

    def _get_train_sampler(self, dataset: Dataset) -> Sampler:
        # As in GRPO, a batch is repeated for each of its optimizer steps: the first one samples the rollouts that all
        # of them use
        return EpochSampler(
            data_source=dataset,
            mini_repeat_count=1,
            batch_size=self.args.items_per_device * self.accelerator.num_processes,
            repeat_count=self.num_iterations,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    def get_total_train_batch_size(self, args: RolloutConfig) -> int:
        return args.rows_per_device * args.world_size  # whatever a forward has

    # Rollouts

    def _play_trees(self, items: list[dict]) -> Trees:
        args = self.args
        first, stream = self.accelerator.process_index * args.items_per_device, f"step {self.state.global_step}"
        return self._play(
            grow_trees,
            items,
            self._score,
            stream,
            first,
            num_generations=args.completions_per_node,
            joint_mode=args.joint_mode,
            handoff=args.handoff,
            early_termination_threshold=args.early_termination_threshold,
            num_episodes=args.num_episodes,
            seed=f"{args.seed}/{stream}",
        )

    def _play_episodes(self, items: list[dict], num_episodes: int, stream: str, first: int = 0) -> Trees:
        score = functools.partial(self._score, evaluation=True)
        return self._play(play_episodes, items, score, stream, first, num_episodes=num_episodes)

    def _play(
        self, function: Callable, items: list[dict], score: Callable, stream: str, first: int, **options: Any
    ) -> Trees:
        """Plays with one of the functions of `rollout.tree`. `first`: the number of the first item."""
        self.observer.reported = {}
        self.sampler.stream = stream
        with scoring(ScoringContext(trainer_state=self.state)):
            return function(
                items,
                self.environment,
                self._sample,
                score,
                num_turns=self.args.num_turns,
                discount=self.args.discount,
                process_reward=self._process_reward,
                numbers=range(first, first + len(items)),
                **options,
            )

    def _process_reward(self, reward: float) -> float:
        return reward * self.args.reward_scale + self.args.reward_shift

    def _sample(self, nodes: list[Node], num_generations: int) -> ByRole:
        """Samples the completions of all agents at the nodes of a turn."""
        with self.observer.timed("generate"):
            return self.sampler(nodes, num_generations)

    def _score(self, nodes: list[Node], evaluation: bool = False) -> list[list[Outcome]]:
        """Scores all joint actions of a turn."""
        with self.observer.timed("reward"):
            try:
                return judge_nodes(
                    self.environment,
                    nodes,
                    evaluation,
                    chat_roles=self.sampler.chat_roles,
                    trainer_state=self.state,
                    metrics=self.observer.reported,
                    reward_none=self.args.reward_none,
                    compared=self.environment if self._only_compares_rewards and not evaluation else None,
                )
            except TaskError as error:
                if error.position is None:
                    raise
                from trl_multiagent.trainers.base.failures import end_with_report, records_of

                end_with_report(self, str(error), joint_actions=[records_of(nodes)[error.position]])

    # The batch

    def _prepare_inputs(self, generation_batch: Batch) -> Batch:
        # `Trainer` calls this for a micro-batch, when the rollouts are sampled
        if self._ahead is not None:
            self._ahead.serve()
        return generation_batch

    def _generate_and_score_completions(self, inputs: list[dict]) -> list[Batch]:
        rows = None if self._ahead is None else self._ahead.take()
        self._step_rows = self._make_rows(lambda: self._play_trees(inputs)) if rows is None else rows
        return self._make_batches(self._step_rows)

    def _make_rows(self, play: Callable[[], Trees]) -> list[Row]:
        """Plays the trees of a batch. Returns their rows."""
        with fail_together(self.accelerator):
            self._turns = play()
        if not self._has_chosen:
            from trl_multiagent.trainers.base.memory import choose_for

            choose_for(self)
        self._judge(self._turns)
        with fail_together(self.accelerator):
            advantages = self.advantages(self._turns)
            rows = collect_rows(self._turns, advantages)
        self.observer.rollout("train", self._turns, advantages)
        return rows

    def _set_rows(self, rows: int, checkpoints: bool) -> None:
        self._has_chosen = True
        self.args.set_rows(rows, checkpoints)
        if not self.args.gradient_checkpointing:
            self.team.gradient_checkpointing_disable()
        elif not self.team.is_gradient_checkpointing:  # a training before has chosen otherwise
            self.team.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)

    def _judge(self, turns: Trees) -> None:
        """Hook for advantages that need a critic, counterfactual rewards, or communication between ranks."""

    def _make_batches(self, all_rows: list[Row]) -> list[Batch]:
        """
        Builds the micro-batches of an optimizer step. All processes have the same number of them, which is as small as
        `per_device_train_batch_size` allows.
        """
        args, roles, accelerator = self.args, self.team.trained_roles, self.accelerator
        with fail_together(accelerator):
            rows = self.rows_to_train(all_rows)
        own_rows = {role: [row for row in rows if role in row.samples] for role in roles}
        most = self._most(max(map(len, [*own_rows.values(), *self._rows.values()])))
        size = args.rows_per_forward
        number = max(1, -(-most // size))
        ends, masks = {role: self.team.end_tokens(role) for role in roles}, args.mask_truncated_completions
        counts = [
            [
                sum(role in x.samples for x in all_rows),
                sum(len(x.trained_ids(role, ends[role], masks)) for x in all_rows),
            ]
            for role in roles
        ]
        totals = accelerator.reduce(torch.tensor(counts, device=accelerator.device), "sum").tolist()
        batches = [Batch() for _ in range(number)]
        for role, (num_rows, num_tokens) in zip(roles, totals, strict=True):
            parts = [self._tensors(part, role) for part in split_rows(own_rows[role], number, size)]
            for batch, tensors in zip(batches, parts, strict=True):
                # The loss is a mean over the rows, or tokens, of all processes, but gradients are averaged over
                # processes
                tensors.num_rows = max(1, num_rows) / accelerator.num_processes
                tensors.num_tokens = max(1, num_tokens) / accelerator.num_processes
                batch.agents[role] = tensors
            if args.beta != 0.0:
                with self._computing_as_reference() as reference:
                    for tensors in parts:
                        tensors.ref_logps = self._logps(reference, role, tensors)
            if self.num_iterations > 1:
                for tensors in parts:
                    tensors.old_logps = self._logps(self.model_wrapped, role, tensors)
            if role in self._router_loss_coefs:
                self._expert_loads[role] = self._expert_load(role, (tensors.inputs for tensors in parts))
        return batches

    def _most(self, number: int) -> int:
        """Returns the largest `number` of any process."""
        return int(self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).max())

    def _tensors(self, rows: Sequence[Row], role: str) -> AgentTensors:
        """
        Builds the tensors of one agent, see [`~trainers.base.batch.agent_tensors`], and the arguments of its forward.
        All are made on the CPU, so that no micro-batch waits for a GPU to know its lengths.
        """
        tensors = agent_tensors(
            rows,
            role,
            self.team.tokenizers[role].pad_token_id,
            self.team.end_tokens(role),
            self.args.mask_truncated_completions,
            sampling_logps=self.args.use_vllm or self._ahead is not None,
        )
        if role in self._router_loss_coefs:
            tensors.router_weights = torch.full((len(tensors),), float(bool(rows)))
        tensors.inputs = forward_inputs(self.team.agents[role], tensors)
        return tensors.to(self.accelerator.device)

    def _logps(self, model: torch.nn.Module, role: str, rows: AgentTensors) -> torch.Tensor:
        """Computes the log-probabilities of one agent's completions under a team. Shape: `completion_ids`."""
        with self._without_training():
            outputs = model(team_inputs={role: rows.inputs})
        return outputs[role].log_probs

    # Loss: one forward pass of the team, a loss per agent, one backward pass

    def compute_loss(self, model: torch.nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        """
        Computes the sum of the losses of all trained agents, each with its router loss if it has one. If a loss is not
        finite, writes the completions to the output folder, and raises a `FloatingPointError`.
        """
        rows = inputs.agents
        self._is_in_backward = False
        forward = functools.partial(
            model,
            team_inputs={role: tensors.inputs for role, tensors in rows.items()},
            critic_inputs={name: tensors.inputs for name, tensors in inputs.critics.items()},
        )
        # The forward of DeepSpeed communicates, so a failed process cannot report its error in between
        outputs = forward() if self.is_deepspeed_enabled else None
        # Before the backward pass: its collectives would wait for a failed process
        with fail_together(self.accelerator):
            outputs = forward() if outputs is None else outputs
            losses = {}
            for role in rows:
                losses[role] = self.agent_loss(role, outputs[role], rows[role])
                if role in self._router_loss_coefs:
                    router_loss = self._expert_loads[role] @ outputs[role].aux_loss[1]
                    self.observer.sums[role, "aux_loss"] += router_loss.detach()
                    # This loss is a sum over processes, but gradients are averaged over processes
                    factor = self._router_loss_coefs[role] * self.accelerator.num_processes
                    losses[role] = losses[role] + factor * router_loss
                self.observer.sums[role, "loss"] += losses[role].detach()
            losses |= self._critic_losses(outputs, inputs)
            total = sum(losses.values())
            if not total.isfinite():
                from trl_multiagent.trainers.base.failures import end_with_report, records_of

                role, loss = next((role, loss) for role, loss in losses.items() if not loss.isfinite())
                name = f"agent {role!r}" if role in self.team.roles else role
                records = [record for nodes in self._turns for record in records_of(nodes)]
                end_with_report(self, f"The loss of {name} is {loss.item()}", joint_actions=records)
        self._is_in_backward = True
        return total

    def _critic_losses(self, outputs: dict[str, Any], batch: Batch) -> dict[str, torch.Tensor]:
        """Returns the losses of the critics on a micro-batch, which are added to the agents' losses."""
        return {}

    def training_step(self, model: torch.nn.Module, inputs: list[dict], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs all forwards and backwards of an optimizer step. The first step of a batch samples it before."""
        with self.observer.timed("step"):
            model.train()  # and the optimizer, as `Trainer` does before it prepares its inputs
            if hasattr(self.optimizer, "train"):
                self.optimizer.train()
            if self._is_between_batches() or not self._buffered_inputs:
                self._buffered_inputs = self._generate_and_score_completions(inputs)
            with contextlib.nullcontext() if self._ahead is None else self._ahead.running():
                loss = None
                while loss is None:
                    try:
                        loss = self._accumulate(model, *args, **kwargs)
                    except (torch.OutOfMemoryError, OtherProcessError) as error:
                        from trl_multiagent.trainers.base.memory import check_out_of_memory, halve_rows

                        check_out_of_memory(self, error)
                    if loss is None:  # outside of the handler, which holds the tensors of the forward
                        halve_rows(self)
        self.observer.end_step()
        return loss

    def _accumulate(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Adds up the gradients of the micro-batches. Only the last backward exchanges gradients between processes."""
        loss, state = 0.0, self.accelerator.gradient_state
        for k, batch in enumerate(self._buffered_inputs, start=1):
            state._set_sync_gradients(k == len(self._buffered_inputs))
            waits = not state.sync_gradients and not self.is_deepspeed_enabled
            with self.accelerator.no_sync(model) if waits else contextlib.nullcontext():
                loss = loss + super().training_step(model, batch, *args, **kwargs)
        return loss

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.args.use_vllm:
            self.generator.forget_weights()

    # Evaluation: samples episodes and computes no loss

    def prediction_step(self, model: Any, inputs: list[dict], *args: Any, **kwargs: Any) -> tuple[None, None, None]:
        self.observer.rollout("eval", self._play_evaluation(inputs, self.num_generations_eval))
        return None, None, None

    # Checkpoints: counts, and the state of the environment

    def _process_state(self) -> dict[str, Any]:
        return {
            **super()._process_state(),
            "generated_tokens": self.generated_tokens,
            "rows": [self.args.rows_per_forward, self.args.gradient_checkpointing],
        }

    def _load_process_state(self, state: dict[str, Any]) -> None:
        super()._load_process_state(state)
        self.generated_tokens = state["generated_tokens"]
        self._set_rows(*state["rows"])  # so that a resumed run computes the same numbers

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        for callback in self.rollout_callbacks:
            callback.on_checkpoint()
        environment = self.environment.state_dict()
        if environment:
            torch.save(environment, Path(output_dir) / ENVIRONMENT_FILE.format(self.args.process_index))

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        epoch, step = super()._init_training_state(*args)
        if step > 0 and isinstance(self.train_dataset, IterableDataset):
            # `Trainer` takes all steps for those of the first pass of a stream. In `epoch`, each pass has `max_steps`
            length = read_json(self._resumed / TRAINER_STATE_NAME)["max_steps"]
            epoch, step = divmod(round(self.state.epoch * length) - 1, length)
            step += 1
        return epoch, step

    def _is_between_batches(self) -> bool:
        return self.state.global_step % self.num_iterations == 0

    def _begin_training(self) -> None:
        self.observer.reset()
        super()._begin_training()
        if self.args.use_vllm:  # a training before ended after as many steps as this one has taken
            self.generator.forget_weights()
        if self._resumed is not None:
            environment = self._resumed / ENVIRONMENT_FILE.format(self.args.process_index)
            if environment.is_file():
                self.environment.load_state_dict(torch.load(environment, weights_only=True))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        output = super()._finalize_training(*args, **kwargs)
        if self.args.should_save:  # so that another training can have the same cost
            folder = Path(self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            cost = {
                "env_steps": self.env_step,
                "generated_tokens": self.generated_tokens,
                "optimizer_steps": self.state.global_step,
            }
            write_json(folder / COST_FILE, cost)
        return output


def check_inputs(
    team: AgentTeam,
    environment: Environment,
    args: RolloutConfig,
    train_dataset: Dataset | IterableDataset | None,
    eval_dataset: Dataset | dict[str, Dataset] | None,
) -> None:
    """
    Raises `TypeError` or `ValueError` if an argument has the wrong type, or the arguments of a trainer do not fit each
    other.
    """
    check_team(team, environment, args.num_agents)
    args.fit(environment)
    args.check_tree_size(len(team.roles))
    for dataset in eval_datasets(eval_dataset):
        check_dataset("eval_dataset", dataset)
    if isinstance(train_dataset, IterableDataset):
        if args.max_steps < 1:
            raise ValueError("`train_dataset` is a stream, whose length is not known: set `max_steps`.")
        return
    check_dataset("train_dataset", train_dataset)
    assert train_dataset is not None
    if len(train_dataset) < args.items_per_device * args.world_size:
        raise ValueError(
            f"`train_dataset` has {len(train_dataset)} items, fewer than the {args.items_per_device} per device x "
            f"{args.world_size} devices of one optimizer step. Give more, or lower `items_per_device`."
        )


def check_team(team: AgentTeam, environment: Environment, num_agents: int | None) -> None:
    """Checks that the team fits the environment."""
    if not isinstance(environment, Environment):
        raise TypeError(
            f"`environment` must be an `Environment`, got {show(environment)}: `@workflow(roles=...)` "
            "makes a function one."
        )
    check_roles(environment.roles)
    team.check_roles_of(environment)
    if num_agents is not None and num_agents != len(team.roles):
        raise ValueError(f"`num_agents` is {num_agents}, but the environment has the roles {list(environment.roles)}.")


class EpochSampler(RepeatSampler):
    """
    A [`~trl.trainer.utils.RepeatSampler`] with an order that depends only on the seed and the epoch, so that a run
    can resume.
    """

    def set_epoch(self, epoch: int) -> None:
        if self.shuffle:
            self.generator.manual_seed(self.seed + epoch)

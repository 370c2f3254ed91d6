"""
The base of all trainers that learn from rollout trees: it samples and scores the trees, builds batches, and evaluates.

An algorithm implements two methods, [`RolloutTrainer.advantages`] and [`RolloutTrainer.agent_loss`].
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch.utils.data import DataLoader, Sampler
from transformers import GenerationConfig, PreTrainedTokenizerBase, TrainerCallback
from transformers.utils import logging
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import FusedCausalLMOutput, RepeatSampler, add_fused_lm_head, split_tensor_dict

from trl_multiagent.environments.base import Environment, Outcome, Turn, check_roles
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.folders import write_text
from trl_multiagent.identity import describe_environment
from trl_multiagent.models.generation import generate_groups
from trl_multiagent.models.positions import check_prompts
from trl_multiagent.models.vllm_generation import check_vllm, make_generations
from trl_multiagent.processes import error_barrier, fail_together
from trl_multiagent.rollout.episodes import play_episodes, turns_of_episodes
from trl_multiagent.rollout.history import WholePrompt, tokenize_nodes, uses_chat_template
from trl_multiagent.rollout.trace import TraceRow, trace_rows
from trl_multiagent.rollout.tree import Node, Samples, grow_trees, judge_nodes
from trl_multiagent.rollout.tree_size import check_tree_size
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.team.sampler import check_first_prompts
from trl_multiagent.trainers.base.alarms import Alarms
from trl_multiagent.trainers.base.checkpoint_files import ENVIRONMENT_FILE
from trl_multiagent.trainers.base.completions import log_completion_tables, print_trees
from trl_multiagent.trainers.base.distribution import check_generation, without_repeated
from trl_multiagent.trainers.base.grpo_loss import GRPOLossMixin
from trl_multiagent.trainers.base.reference import check_reference_sync
from trl_multiagent.trainers.base.rescue import repeatable
from trl_multiagent.trainers.base.rollout_config import RolloutConfig
from trl_multiagent.trainers.base.rollout_metrics import StepTotals
from trl_multiagent.trainers.base.rows import (
    Row,
    agent_tensors,
    collect_rows,
    forward_inputs,
    join_agents,
    split_rows,
    tensors_of_agent,
    trim_padding,
)
from trl_multiagent.trainers.base.task_metrics import TaskMetricsMixin
from trl_multiagent.trainers.base.team_mixin import TeamTrainerMixin, router_loss_coefs
from trl_multiagent.trainers.base.trace_files import TraceFiles, remove_after


logger = logging.get_logger(__name__)

COST_FILE = "training_cost.json"  # in the output folder
# Steps without a signal after which a line says so
STEPS_WITHOUT_SIGNAL = 10


class RolloutTrainer(TaskMetricsMixin, TeamTrainerMixin, GRPOLossMixin, GRPOTrainer):
    """
    Base class of the trainers that learn from rollout trees. Each optimizer step samples one batch of trees with the
    current team and uses it once, or for `num_iterations` optimizer steps.

    A subclass defines how returns become advantages ([`~RolloutTrainer.advantages`]) and the loss of an agent
    ([`~RolloutTrainer.agent_loss`]). It may leave rows out of the update ([`~RolloutTrainer.rows_to_train`]).

    Args:
        team ([`AgentTeam`]):
            The agents, one per role of the environment and in its order.
        environment ([`Environment`]):
            The task: its prompts and its joint reward.
        args ([`RolloutConfig`]):
            Configuration.
        train_dataset ([`~datasets.Dataset`]):
            The items. The environment receives all columns.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Items for evaluation. For each, `num_generations_eval` episodes are sampled, without early termination.
        callbacks (`list[TrainerCallback]`, *optional*):
            Callbacks, as in any `Trainer`.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and learning rate scheduler for the parameters of the whole team.

    Raises:
        TypeError: `environment` or `train_dataset` has the wrong type.
        ValueError: The arguments do not fit the team, the environment or the dataset.
    """

    args: RolloutConfig
    log_completions: bool
    _buffered_inputs: list[dict[str, torch.Tensor]] | None

    def __init__(
        self,
        team: AgentTeam,
        environment: Environment,
        args: RolloutConfig,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        check_team(team, environment, args.num_agents)
        check_tree_size(
            args.num_generations,
            args.num_turns,
            args.joint_mode,
            args.handoff,
            len(team.roles),
            args.max_joint_actions,
        )
        check_reference_sync(team, args)
        if args.use_vllm:
            check_vllm(team.policies, args)
        if not isinstance(train_dataset, Dataset):
            raise TypeError(f"`train_dataset` must be a `datasets.Dataset`, got `{type(train_dataset).__name__}`.")
        if len(train_dataset) < args.items_per_device * args.world_size:
            raise ValueError(
                f"`train_dataset` has {len(train_dataset)} items, fewer than the {args.items_per_device} per device x "
                f"{args.world_size} devices of one optimizer step. Lower `items_per_device`."
            )
        check_best_metric(args, eval_dataset)
        self.environment = environment
        self.env_step = 0  # joint actions scored in training, by all processes
        self.generated_tokens = 0  # of all agents in training, in all processes
        self._levels: list[list[Node]] = []  # the nodes of the last batch, kept for failure reports
        self._totals = StepTotals()
        self._logged: dict[str, list[float]] = {}  # by the reward functions, on the current batch
        self._shown_rows: list[TraceRow] = []  # of the latest batch of all processes, if completions are logged
        self._steps_without_signal = 0
        self._warned_about_signal = False
        self._trace: TraceFiles | None = None
        if args.trace_steps is not None:
            folder = Path(args.output_dir) / "trace"
            self._trace = TraceFiles(
                folder, args.process_index, args.trace_steps, args.trace_format, args.trace_max_files
            )
        self._prepare_team(team, args)
        self._router_loss_coefs = router_loss_coefs(team, args)
        if self._router_loss_coefs and args.num_iterations > 1:
            raise ValueError(
                "`num_iterations` above 1 does not go with the router loss of a mixture of experts, whose load is that of "
                "the policy that sampled the batch. Set `router_aux_loss_coef` to 0.0 or `num_iterations` to 1."
            )
        self._expert_loads = {}
        reference = None if args.beta == 0.0 else self._make_reference()
        self._init_grpo(
            args,
            model=team,
            reward_funcs=environment.score,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=team.tokenizers[team.roles[0]],
            callbacks=[make_alarms(team, environment, args), *(callbacks or [])],
            optimizers=optimizers,
        )
        check_generation(self.accelerator, args)
        for model in team.base_models:
            add_fused_lm_head(model, temperature=self.temperature, outputs=("log_probs", "entropy"))
        self._set_up_agents()
        if args.use_vllm:
            eos_token_ids = {role: self._agent_attributes[role]["eos_token_ids"] for role in team.roles}
            self._generations = make_generations(team.policies, eos_token_ids, self.accelerator, args)
        self._set_up_reference(reference, self.temperature)
        evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        for items in (train_dataset, *evaluated):
            if items is not None:
                self._check_items(items)

    def advantages(self, levels: list[list[Node]]) -> list[list[dict[str, torch.Tensor]]]:
        """
        Computes the advantages of a batch of trees.

        Args:
            levels (`list[list[Node]]`): The nodes of each turn, with their returns.

        Returns:
            `list[list[dict[str, torch.Tensor]]]`: For each node, the advantages of every trained agent's completions,
            of shape `(G,)`.
        """
        raise NotImplementedError

    def agent_loss(self, role: str, outputs: FusedCausalLMOutput, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """
        Computes the loss of one agent on the rows of one micro-batch.

        Args:
            role (`str`): The agent.
            outputs ([`~trl.trainer.utils.FusedCausalLMOutput`]): The agent's output for the rows: `log_probs` and
                `entropy`.
            rows (`dict[str, torch.Tensor]`): The agent's rows, see [`~trainers.base.rows.agent_tensors`].

        Returns:
            `torch.Tensor`: A scalar. The loss of the batch is its sum over micro-batches, averaged over processes.
        """
        raise NotImplementedError

    def rows_to_train(self, rows: list[Row]) -> list[Row]:
        """Selects the rows of a batch that take part in the update. By default, all do."""
        return rows

    # Overrides of the team mixin

    def _attributes_of_agent(self, role: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        eos_token_ids = self.team.end_tokens(role)
        generation_kwargs = {
            **self.generation_kwargs,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": eos_token_ids,
        }
        return {
            **super()._attributes_of_agent(role, tokenizer),
            "eos_token_ids": eos_token_ids,
            "generation_kwargs": generation_kwargs,
            "generation_config": GenerationConfig(**generation_kwargs, disable_compile=True),
        }

    def _run_settings(self) -> dict[str, Any]:
        return {**super()._run_settings(), **describe_environment(self.environment)}

    def _card_facts(self) -> dict[str, Any]:
        return {**super()._card_facts(), "env steps": self.env_step}

    def _reference(self) -> torch.nn.Module | None:
        return self.ref_model

    # Data: a batch has `items_per_device` items, each the root of one tree

    def get_train_dataloader(self) -> DataLoader:
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self.args.items_per_device,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        # As in GRPO, a batch is repeated for each micro-batch: the first one samples the rollouts, and all of them use
        # these
        return EpochSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=1,
            batch_size=self.args.items_per_device * self.accelerator.num_processes,
            repeat_count=self.args.gradient_accumulation_steps * self.num_iterations,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    # Rollouts

    def collaborate(self, items: Sequence[dict], num_episodes: int = 1) -> list[list[Turn]]:
        """
        Plays episodes with the current team without training on them. Under ZeRO-3, every process must call this
        method, each with its own items or with none.

        Args:
            items (`Sequence[dict]`):
                Dataset rows.
            num_episodes (`int`, *optional*, defaults to `1`):
                Number of episodes sampled per item.

        Returns:
            `list[list[Turn]]`: The turns of each episode. Episode e of item i is entry `i * num_episodes + e`.
        """
        self._logged = {}
        with self.team.evaluating():
            return turns_of_episodes(self._play_episodes(list(items), num_episodes, synchronized=False))

    def _play_trees(self, items: list[dict]) -> list[list[Node]]:
        args = self.args
        return grow_trees(
            items,
            self.environment,
            self._sample,
            self._score,
            num_turns=args.num_turns,
            num_generations=args.num_generations,
            joint_mode=args.joint_mode,
            handoff=args.handoff,
            early_termination_threshold=args.early_termination_threshold,
            discount=args.discount,
            process_reward=self._process_reward,
            with_unvisited=self.team.critics is not None,
        )

    def _play_episodes(self, items: list[dict], num_episodes: int = 1, synchronized: bool = True) -> list[list[Node]]:
        """Plays episodes that are not trained on. `synchronized`: whether all processes play at the same time."""
        return play_episodes(
            items,
            self.environment,
            lambda nodes, num_generations: self._sample(nodes, num_generations, synchronized),
            lambda nodes: self._score(nodes, evaluation=True),
            num_turns=self.args.num_turns,
            num_episodes=num_episodes,
            discount=self.args.discount,
            process_reward=self._process_reward,
        )

    def _process_reward(self, reward: float) -> float:
        return reward * self.args.reward_scale + self.args.reward_shift

    def _sample(self, nodes: list[Node], num_generations: int, synchronized: bool = True) -> dict[str, list[Samples]]:
        """Samples the completions of all agents at the nodes of a turn."""
        return {role: self._sample_agent(role, nodes, num_generations, synchronized) for role in self.team.roles}

    def _sample_agent(self, role: str, nodes: list[Node], num_generations: int, synchronized: bool) -> list[Samples]:
        with self.agent_scope(role):
            prompts = self._whole_prompts(role, nodes)
            self._check_lengths(role, prompts)
            if synchronized:
                # ZeRO-3 gathers the weights next, and a process that has failed cannot take part in that
                error_barrier(self.accelerator)
            with self._timed("generate"):
                groups, logps = self._generate_groups(role, [prompt.ids for prompt in prompts], num_generations)
                return [
                    Samples(
                        prompt.ids,
                        group,
                        self.processing_class.batch_decode(group, skip_special_tokens=True),
                        group_logps,
                        prompt.prompt,
                        prompt.dropped_turns,
                    )
                    for prompt, group, group_logps in zip(prompts, groups, logps, strict=True)
                ]

    def _generate_groups(self, role: str, prompt_ids: list[list[int]], num_generations: int) -> tuple[list, list]:
        """
        Samples completions of the active agent. Returns their token ids for each prompt, and their log-probabilities,
        which are `None` unless vLLM sampled them.
        """
        if self.use_vllm:
            step = 0 if role in self.team.frozen else self.state.global_step  # a frozen agent's weights are sent once
            return self._generations[role].sample(role, prompt_ids, num_generations, step)
        with (
            self.team.evaluating(),
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ),
            self.accelerator.autocast(),
        ):
            groups = generate_groups(
                self.team.active_agent,
                prompt_ids,
                num_generations,
                self.generation_config,
                self.args.generation_token_budget,
            )
        return groups, [None] * len(groups)

    def _tokenize_nodes(self, role: str, nodes: list[Node]) -> list[list[int]]:
        """The token ids of one agent's prompt at each node."""
        return [prompt.ids for prompt in self._whole_prompts(role, nodes)]

    def _whole_prompts(self, role: str, nodes: list[Node]) -> list[WholePrompt]:
        """Makes one agent's prompt at each node, with what it sees of its past prompts and responses."""
        prompts = tokenize_nodes(
            role,
            nodes,
            self.processing_class,
            end_tokens=self.eos_token_ids,
            as_chat=uses_chat_template(self.processing_class, self.args.use_chat_template),
            options=self.args.history_options,
            tokenize=lambda prompts: self._tokenize_prompts(prompts)[0],
            render=self._render_chat,
        )
        if not all(prompt.ids for prompt in prompts):
            raise ValueError(
                f"A prompt of agent {role!r} has no tokens: the environment must return prompts that have some."
            )
        return prompts

    def _check_lengths(self, role: str, prompts: list[WholePrompt]) -> None:
        """Refuses prompts that are too long for the agent's model."""
        lengths = [len(prompt.ids) for prompt in prompts]
        check_prompts(
            role, self.team.active_agent, [x.prompt for x in prompts], lengths, self.args.max_completion_length
        )

    def _check_items(self, items: Dataset) -> None:
        """
        Checks that the first prompts of some items are not too long for the models of the agents. Only models with learned positions
        have such a limit; without any, nothing is done.

        Raises:
            TooLongError: a prompt and its completion may have more tokens than the model has positions.
        """

        def check(role: str, nodes: list[Node]) -> None:
            with self.agent_scope(role):
                self._check_lengths(role, self._whole_prompts(role, nodes))

        check_first_prompts(items, self.environment, self.team.agents, check)

    def _render_chat(self, messages: list[dict[str, str]]) -> str:
        """The text that `_tokenize_prompts` tokenizes."""
        return self.processing_class.apply_chat_template(
            messages,
            chat_template=self.chat_template,
            add_generation_prompt=True,
            tokenize=False,
            **self.chat_template_kwargs,
        )

    @property
    def _chat_roles(self) -> frozenset[str]:
        setting = self.args.use_chat_template
        return frozenset(role for role, x in self.team.tokenizers.items() if uses_chat_template(x, setting))

    def _score(self, nodes: list[Node], evaluation: bool = False) -> list[list[Outcome]]:
        """Scores all joint actions of a turn."""
        with self._timed("reward"):
            try:
                return judge_nodes(self.environment, nodes, evaluation, self._chat_roles, self.state, self._logged)
            except TaskError as error:
                if error.position is None:
                    raise
                records = joint_action_records(nodes, with_rewards=False)
                self._abort_with_report(str(error), joint_actions=[records[error.position]])

    def _timed(self, phase: str) -> contextlib.AbstractContextManager[None]:
        # Evaluations are not timed, because they belong to no optimizer step
        return self._totals.timed(phase) if self.model.training else contextlib.nullcontext()

    # The batch

    def _prepare_inputs(self, generation_batch: list[dict]) -> dict[str, torch.Tensor]:
        # GRPOTrainer shuffles the rows of a generation batch, because it spreads them over several optimizer steps.
        # Here each step uses all rows, so they keep their order: adjacent siblings share their prompt
        micro_batches = self.args.gradient_accumulation_steps
        if self._step % (micro_batches * self.num_iterations) == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs = self._split_batch(batch, micro_batches)
        return self._buffered_inputs[self._step % micro_batches]

    def _split_batch(self, batch: dict[str, torch.Tensor], micro_batches: int) -> list[dict[str, torch.Tensor]]:
        """Splits the tensors of a batch into micro-batches."""
        return split_tensor_dict(batch, micro_batches)

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, torch.Tensor]:
        self._logged = {}
        with fail_together(self.accelerator), repeatable():
            self._levels = self._play_trees(inputs)
        self._log_rollout("train", self._levels)
        self._judge(self._levels)
        with fail_together(self.accelerator):
            advantages = self.advantages(self._levels)
        self._record(self._levels, advantages)
        return self._make_batch(self._levels, advantages)

    def _judge(self, levels: list[list[Node]]) -> None:
        """Called before [`~RolloutTrainer.advantages`], for what needs a model or other processes, such as critics."""

    def _make_batch(
        self, levels: list[list[Node]], advantages: list[list[dict[str, torch.Tensor]]]
    ) -> dict[str, torch.Tensor]:
        """
        Builds the training batch: tensors named `"<role>/<name>"`, which have the same rows for every trained agent.

        All processes get the same number of rows; padding rows fill the gap.
        """
        args, roles = self.args, self.team.trained_roles
        with fail_together(self.accelerator):
            all_rows = collect_rows(levels, advantages)
            rows = self.rows_to_train(all_rows)

        # The loss is a mean over the rows of all processes, and all micro-batches have the same number of rows
        tokens = [sum(row.num_tokens(role) for row in all_rows) for role in roles]
        signals = sum(any(row.advantages.values()) for row in all_rows)
        sizes = torch.tensor([[len(rows), len(all_rows), signals, *tokens]], device=self.accelerator.device)
        sizes = self.accelerator.gather(sizes)
        self._watch_signal(sizes[:, 2].sum().item())
        micro_batches = args.gradient_accumulation_steps
        num_rows = micro_batches * max(1, -(-sizes[:, 0].max().item() // micro_batches))
        self._set_loss_scale(num_rows * self.accelerator.num_processes, sizes[:, 1].sum().item())

        batch = {}
        for k, role in enumerate(roles):
            tensors = agent_tensors(
                rows,
                role,
                num_rows,
                self.team.tokenizers[role].pad_token_id,
                self._agent_attributes[role]["eos_token_ids"],
                args.mask_truncated_completions,
                sampling_logps=self._corrects_sampling,
            )
            tensors["num_items_in_batch"] = sizes[:, 3 + k].sum()
            tensors = {name: x.to(self.accelerator.device) for name, x in tensors.items()}
            if self.beta != 0.0:
                with self._computing_as_reference() as reference:
                    tensors["ref_per_token_logps"] = self._logps(reference, role, tensors)
            if self.num_iterations > 1:
                tensors["old_per_token_logps"] = self._logps(self.model_wrapped, role, tensors)
            if role in self._router_loss_coefs:
                router_weights = torch.tensor([1.0] * len(rows) + [0.0] * (num_rows - len(rows)))
                tensors["router_weights"] = router_weights.to(self.accelerator.device)
                chunks = split_rows(tensors, args.per_device_train_batch_size)
                inputs = (forward_inputs(self.team.agents[role], trim_padding(chunk)) for chunk in chunks)
                self._expert_loads[role] = self._expert_load(role, inputs)
            batch[role] = tensors
        return join_agents(batch)

    @torch.no_grad()
    def _logps(self, model: torch.nn.Module, role: str, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """Computes the log-probabilities of one agent's completions under a team. Shape: `completion_ids`."""
        agent = self.accelerator.unwrap_model(model).agents[role]
        logps = []
        with self.team.evaluating(), self.accelerator.autocast():
            for chunk in split_rows(rows, self.args.per_device_train_batch_size):
                outputs = model(team_inputs={role: forward_inputs(agent, chunk)})
                logps.append(outputs[role].log_probs[:, -chunk["completion_ids"].size(1) :])
        return torch.cat(logps)

    # Loss: one forward pass of the team, a loss per agent, one backward pass

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Computes the sum of the losses of all trained agents, each with its router loss if it has one.

        Raises:
            FloatingPointError: A loss is not finite; the completions are written to the output folder.
        """
        rows = {role: trim_padding(tensors_of_agent(inputs, role)) for role in self.team.trained_roles}
        outputs = model(
            team_inputs={role: forward_inputs(self.team.agents[role], rows[role]) for role in rows},
            **self._critic_inputs(inputs),
        )
        if self.num_iterations > 1 and self.args.importance_ratio == "joint":
            add_other_log_ratios(rows, {role: outputs[role].log_probs for role in rows})
        losses = {}
        for role in rows:
            losses[role] = self.agent_loss(role, outputs[role], rows[role])
            if role in self._router_loss_coefs:
                router_loss = self._router_loss(role, outputs[role].aux_loss)
                self._totals.router_losses[role] += router_loss.detach()
                # This loss is a sum over processes, but gradients are averaged over processes
                factor = self._router_loss_coefs[role] * self.accelerator.num_processes
                losses[role] = losses[role] + factor * router_loss
            self._totals.losses[role] += losses[role].detach()
        losses |= self._critic_losses(outputs, inputs)
        with fail_together(
            self.accelerator
        ):  # before the backward pass, whose collectives would wait for a failed process
            for role, loss in losses.items():
                if not loss.isfinite():
                    records = [record for nodes in self._levels for record in joint_action_records(nodes)]
                    name = f"agent {role!r}" if role in rows else role
                    self._abort_with_report(f"The loss of {name} is {loss.item()}", joint_actions=records)
        return sum(losses.values())

    def _critic_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Further arguments of the team's forward: those of the critics, if the algorithm has some."""
        return {}

    def _critic_losses(self, outputs: dict[str, Any], inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The losses of the critics on a micro-batch, which are added to those of the agents, by their names in messages."""
        return {}

    def training_step(
        self, model: torch.nn.Module, inputs: list[dict], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        seconds = self._totals.seconds
        rollout_before = seconds["generate"] + seconds["reward"]
        with self._totals.timed("step"):
            loss = super().training_step(model, inputs, num_items_in_batch)
        rollout = seconds["generate"] + seconds["reward"] - rollout_before
        seconds["update"] += seconds.pop("step") - rollout
        if self.accelerator.sync_gradients:
            self._log_step(self._totals)
            self._totals = StepTotals()
            if self._trace is not None:
                self._trace.end_step(self.state.global_step + 1)
        return loss

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.use_vllm:
            for generation in self._generations.values():
                generation.loaded_steps.clear()

    # Evaluation: samples episodes and computes no loss

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: list[dict],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, None, None]:
        self._logged = {}
        with fail_together(self.accelerator):
            items = without_repeated(self.accelerator, inputs, self.num_generations_eval)
            levels = self._play_episodes(items)
        self._log_rollout("eval", levels)
        self._record(levels)
        return None, None, None

    # Checkpoints: metrics and completions that were not logged yet, and the state of the environment

    def _process_state(self) -> dict[str, Any]:
        counts = {"env_step": self.env_step, "generated_tokens": self.generated_tokens}
        return {**super()._process_state(), **counts, "shown_rows": self._shown_rows}

    def _load_process_state(self, state: dict[str, Any]) -> None:
        super()._load_process_state(state)
        self.env_step = state["env_step"]
        # Checkpoints of earlier releases lack the following ones
        self.generated_tokens = state.get("generated_tokens", 0)
        self._shown_rows = state.get("shown_rows", [])

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._trace is not None:
            self._trace.flush()  # a run that resumes here does not sample these rows again
        environment = self.environment.state_dict()
        if environment:
            torch.save(environment, Path(output_dir) / ENVIRONMENT_FILE.format(self.args.process_index))

    def _is_between_batches(self) -> bool:
        return self.state.global_step % self.num_iterations == 0

    def _begin_training(self) -> None:
        super()._begin_training()
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        if self._trace is not None and self.args.should_save:
            removed = remove_after(self._trace.folder, self.state.global_step)
            if removed:
                logger.warning(
                    f"{removed} files of the trace in {self._trace.folder} had steps of an earlier run that this run "
                    f"repeats, after step {self.state.global_step}. They were deleted."
                )
        if self._resumed is not None:
            environment = self._resumed / ENVIRONMENT_FILE.format(self.args.process_index)
            if environment.is_file():
                self.environment.load_state_dict(torch.load(environment, weights_only=True))

    # Metrics

    def _log_step(self, step: StepTotals) -> None:
        """Adds the metrics of one optimizer step of all processes to those that are logged next."""
        self._check_engines(step)
        metrics = self._metrics["train"]
        for phase in ("generate", "reward", "update"):
            metrics[f"time/{phase}"].append(step.seconds[phase])
        roles = self.team.trained_roles
        losses = self.accelerator.reduce(torch.stack([step.losses[role] for role in roles]), "mean")
        for role, value in zip(roles, losses, strict=True):
            metrics[f"agents/{role}/loss"].append(value.item())
        for (role, name), total in step.token_sums.items():
            metrics[f"agents/{role}/{name}"].append(total / max(1.0, step.tokens[role]))
        for role, value in step.router_losses.items():
            metrics[f"agents/{role}/aux_loss"].append(self.accelerator.reduce(value, "sum").item())

    def _log_rollout(self, mode: str, levels: list[list[Node]]) -> None:
        """Adds the metrics of one batch of trees of all processes to those that are logged next."""
        totals, metrics = self._add_task_metrics(mode, levels, self._logged), self._metrics[mode]
        if mode == "train":
            self.state.num_input_tokens_seen += totals.num_tokens
            self.env_step += totals.totals["reward"].count
            self.generated_tokens += totals.generated_tokens
            metrics["env_step"] = [self.env_step]
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]

    def _watch_signal(self, signals: int) -> None:
        """Says once if nothing was learned for several steps. `signals`: rows of the batch with an advantage."""
        self._steps_without_signal = 0 if signals else self._steps_without_signal + 1
        if self._steps_without_signal == STEPS_WITHOUT_SIGNAL and not self._warned_about_signal:
            self._warned_about_signal = True
            if self.accelerator.is_main_process:
                logger.warning(
                    f"In the last {STEPS_WITHOUT_SIGNAL} steps, all advantages were zero: the joint actions of every node "
                    "had equal returns, so the agents learned nothing. Check the reward, or raise `num_generations` or "
                    "`temperature`."
                )

    # Completions: the trace, the terminal, and the tables of trackers, which all show the same rows

    def _record(self, levels: list[list[Node]], advantages: list[list[dict[str, torch.Tensor]]] | None = None) -> None:
        """Adds the joint actions of a batch to the trace and to the completions that are logged next."""
        if self._trace is None and not self.log_completions:
            return
        training = advantages is not None
        rows = trace_rows(
            levels,
            advantages,
            step=self.state.global_step + training,
            split="train" if training else self._eval_prefix,
            process=self.accelerator.process_index,
        )
        if self._trace is not None:
            self._trace.add(rows)
        if self.log_completions:
            self._shown_rows = gather_object(rows)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs_completions, self.log_completions = (
            self.log_completions,
            False,
        )  # GRPOTrainer's table has no columns for agents
        try:
            super().log(logs, start_time)
        finally:
            self.log_completions = logs_completions
        if self._shown_rows and self.accelerator.is_main_process:
            print_trees(self._shown_rows, self.num_completions_to_print)
            log_completion_tables(self._shown_rows, self.args, self.log_unique_prompts)
        self._shown_rows = []

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if self._trace is not None and not self.is_in_train:
            self._trace.flush()
        return metrics

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._trace is not None:
            self._trace.flush()
        output = super()._finalize_training(*args, **kwargs)
        if self.args.should_save:
            self._write_cost()
        return output

    def _write_cost(self) -> None:
        """Writes what the training cost, so that another one can be compared with it at the same cost."""
        cost = {
            "env_steps": self.env_step,
            "generated_tokens": self.generated_tokens,
            "optimizer_steps": self.state.global_step,
        }
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / COST_FILE, json.dumps(cost, indent=2) + "\n")


def add_other_log_ratios(rows: dict[str, dict[str, torch.Tensor]], log_probs: dict[str, torch.Tensor]) -> None:
    """
    Adds `other_log_ratios` of shape `(num_rows,)` to the rows of each agent: the sum over the other agents of the mean over
    their completion's tokens of log(pi / pi_old), without gradient.

    Args:
        rows (`dict[str, dict]`): The rows of each agent, with `old_per_token_logps`.
        log_probs (`dict[str, torch.Tensor]`): The current log-probabilities of each agent; their last columns are those of
            the completions.
    """
    ratios = {}
    for role, tensors in rows.items():
        old, mask = tensors["old_per_token_logps"], tensors["completion_mask"]
        difference = (log_probs[role].detach()[:, -old.size(1) :] - old) * mask
        ratios[role] = difference.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    for role, tensors in rows.items():
        tensors["other_log_ratios"] = sum(
            (x for other, x in ratios.items() if other != role), torch.zeros_like(ratios[role])
        )


def check_team(team: AgentTeam, environment: Environment, num_agents: int | None) -> None:
    """Raises an error if the team does not fit the environment."""
    if not isinstance(environment, Environment):
        raise TypeError(
            f"`environment` must be an `Environment`, got `{type(environment).__name__}`: subclass `Environment`."
        )
    check_roles(environment.roles)
    if tuple(team.roles) != tuple(environment.roles):
        raise ValueError(f"The team has the roles {list(team.roles)}, the environment {list(environment.roles)}.")
    if num_agents is not None and num_agents != len(team.roles):
        raise ValueError(f"`num_agents` is {num_agents}, but the environment has the roles {list(environment.roles)}.")


def check_best_metric(args: RolloutConfig, eval_dataset: Dataset | dict[str, Dataset] | None) -> None:
    """
    Checks that the best checkpoint can be chosen where there are several evaluation sets, each of which has metrics of its own.

    Raises:
        ValueError: `metric_for_best_model` is not a metric of one of them.
    """
    chooses = args.load_best_model_at_end or args.save_strategy == "best"
    if not isinstance(eval_dataset, dict) or not chooses or args.metric_for_best_model is None:
        return
    metric = args.metric_for_best_model.removeprefix("eval_")
    if not any(metric.startswith(f"{name}_") for name in eval_dataset):
        choices = ", ".join(repr(f"{name}_reward") for name in eval_dataset)
        raise ValueError(
            f"`metric_for_best_model` is {metric!r}, but there are several evaluation sets, each with metrics of its own: choose that of "
            f"one of them, such as {choices}."
        )


def make_alarms(team: AgentTeam, environment: Environment, args: RolloutConfig) -> Alarms:
    """The alarms of a training."""
    watched = environment.unwrapped.watched_metrics
    return Alarms(team.roles, args.num_generations > 1, watched, args.on_cliff, args.cliff_drop)


def joint_action_records(nodes: list[Node], with_rewards: bool = True) -> list[dict]:
    """Returns the joint actions of some nodes for a failure report."""
    records = []
    for node in nodes:
        for k, joint_action in enumerate(node.joint_actions):
            record = {"item": node.item, "reward": node.rewards[k]} if with_rewards else {"item": node.item}
            records.append({**record, "completions": joint_action})
    return records


class EpochSampler(RepeatSampler):
    """
    A [`~trl.trainer.utils.RepeatSampler`] whose order depends only on the seed and the epoch, so that a run can
    resume.
    """

    def set_epoch(self, epoch: int) -> None:
        if self.shuffle:
            self.generator.manual_seed(self.seed + epoch)

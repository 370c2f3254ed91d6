import contextlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from datasets import Dataset
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.models import prepare_deepspeed, unwrap_model_for_generation
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import RepeatSampler, add_fused_lm_head, pad, split_tensor_dict

from trl_multiagent.environments.base import Environment, Outcome, Turn, judge, scoring_metrics
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.models.generation import generate_groups, whole_prompt
from trl_multiagent.models.router_loss import expert_load, without_router_logits
from trl_multiagent.models.shared_prompts import can_share_prompts, takes_positions, token_positions
from trl_multiagent.models.vllm_generation import check_vllm, make_generations, sampling_correction
from trl_multiagent.rollout.advantages import sibling_advantages
from trl_multiagent.rollout.tree import Node, Samples, grow_trees
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.distribution import check_distribution, fail_together, meet
from trl_multiagent.trainers.base.team_mixin import (
    TeamTrainerMixin,
    check_agent_settings,
    check_team,
    router_loss_coefs,
)
from trl_multiagent.trainers.magrpo_config import MAGRPOConfig


class MAGRPOTrainer(TeamTrainerMixin, GRPOTrainer):
    """
    Trainer for Multi-Agent Group Relative Policy Optimization (MAGRPO), introduced in [LLM Collaboration With
    Multi-Agent Reinforcement Learning](https://huggingface.co/papers/2508.04652).

    Every optimizer step plays one batch of rollout trees with the current team and uses all of it. For agent i the loss
    is the mean over the batch's rows (items, nodes and siblings) of -A_g * sum over the completion's tokens of log pi_i,
    with the advantage A_g of [`~trl_multiagent.rollout.advantages.sibling_advantages`].

    Args:
        team ([`AgentTeam`]):
            The agents, one per role of the environment and in its order.
        environment ([`Environment`]):
            Prompts and joint reward of the task.
        args ([`MAGRPOConfig`], *optional*):
            Configuration. If `None`, a default configuration is used.
        train_dataset ([`~datasets.Dataset`]):
            The items. Every column reaches the environment.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Items to evaluate on: `num_generations_eval` sampled episodes each, without early termination.
        callbacks (`list[TrainerCallback]`, *optional*):
            Callbacks, as in any `Trainer`.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler for the parameters of the whole team.

    Example:

    ```python
    from datasets import Dataset
    from trl_multiagent import AgentTeam, FunctionEnvironment, MAGRPOConfig, MAGRPOTrainer

    environment = FunctionEnvironment(
        prompts={"poet": "Write a line about {topic}.", "critic": "Name one word for {topic}."},
        reward_funcs=lambda completions, **columns: [float(c["critic"] in c["poet"]) for c in completions],
    )
    trainer = MAGRPOTrainer(
        team=AgentTeam.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", roles=environment.roles),
        environment=environment,
        args=MAGRPOConfig(output_dir="poets", items_per_device=4),
        train_dataset=Dataset.from_dict({"topic": ["rain", "iron", "bees", "tides"]}),
    )
    trainer.train()
    ```
    """

    _tag_names = ["trl", "trl-multiagent", "magrpo"]
    _name = "MAGRPO"
    _card_settings = [
        "num_turns",
        "num_generations",
        "joint_mode",
        "handoff",
        "advantage_mode",
        "discount",
        "reward_scale",
        "reward_shift",
        "items_per_device",
        "max_completion_length",
        "temperature",
        "learning_rate",
        "beta",
        "seed",
    ]
    _paper = {
        "title": "LLM Collaboration With Multi-Agent Reinforcement Learning",
        "id": "2508.04652",
        # docstyle-ignore
        "citation": """\
@misc{liu2025llm,
    title         = {{LLM Collaboration With Multi-Agent Reinforcement Learning}},
    author        = {Shuo Liu and Tianle Chen and Zeyu Liang and Xueguang Lyu and Christopher Amato},
    year          = 2025,
    eprint        = {arXiv:2508.04652},
}""",
    }

    def __init__(
        self,
        team: AgentTeam,
        environment: Environment,
        args: MAGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        if args is None:
            args = MAGRPOConfig(f"{environment.roles[-1]}-{self._name}")
        check_team(team, environment, args.num_agents)
        check_agent_settings(team, args)
        if args.use_vllm:
            check_vllm(team.policies, args)
        if not isinstance(train_dataset, Dataset):
            raise TypeError(f"`train_dataset` must be a `datasets.Dataset`, got `{type(train_dataset).__name__}`.")
        if len(train_dataset) < args.items_per_device * args.world_size:
            raise ValueError(
                f"`train_dataset` has {len(train_dataset)} items, fewer than the {args.items_per_device} per device x "
                f"{args.world_size} devices of one optimizer step. Lower `items_per_device`."
            )
        self.team = team
        self.environment = environment
        self.env_step = 0  # joint actions whose reward was evaluated in training, over all processes
        self._levels = []  # the nodes of the last batch, for error reports
        self._loss_scale = 1.0
        self._seconds = defaultdict(float)  # of each phase of the current optimizer step
        # Each agent's loss and token means over the micro-batches of the current optimizer step
        self._step_losses = defaultdict(float)
        self._step_tokens = defaultdict(float)
        self._step_sums = defaultdict(float)
        self._step_router_losses = defaultdict(float)

        self._prepare_team(args)
        self._router_loss_coefs = router_loss_coefs(team, args)
        self._expert_loads = {}  # of the current batch, by role
        # The reference policy is every agent's initial policy. LoRA agents have it within the team
        reference_team = None
        if args.beta != 0.0 and team.has_adapters:
            team.keep_reference()
        elif args.beta != 0.0:
            reference_team = team.frozen_copy()

        # GRPO would load a single reference model, generate for a single model with vLLM, switch off dropout modules for
        # good, look for routers in the first agent only, and asks `luspo` for sequence-level ratios, which are 1 here
        changes = {"beta": 0.0, "sync_ref_model": False, "use_vllm": False, "disable_dropout": False}
        with _changed(args, router_aux_loss_coef=None, importance_sampling_level="sequence", **changes):
            super().__init__(
                model=team,
                reward_funcs=environment.score,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=team.tokenizers[team.roles[0]],
                callbacks=callbacks,
                optimizers=optimizers,
            )
        check_distribution(self.accelerator, args)
        self.importance_sampling_level = args.importance_sampling_level
        self.aux_loss_enabled = False  # GRPO's is one of each micro-batch; see `router_loss`
        if self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = False  # every backward reaches every agent

        # GRPO patched the forward of the team; the log-probabilities come from the agents'
        del team.__dict__["forward"]
        for model in team.base_models:
            add_fused_lm_head(model, temperature=self.temperature, outputs=("log_probs", "entropy"))
        self._set_up_agents()
        self.use_vllm = args.use_vllm
        self._corrects_sampling = args.use_vllm and args.vllm_importance_sampling_correction
        if args.use_vllm:
            eos_token_ids = {role: self._agent_attributes[role]["eos_token_ids"] for role in team.roles}
            self._generations = make_generations(team.policies, eos_token_ids, self.accelerator, args)

        self.beta = args.beta
        if reference_team is not None:
            for model in reference_team.base_models:
                add_fused_lm_head(model, temperature=self.temperature)
            self.ref_model = (
                prepare_deepspeed(reference_team, self.accelerator)
                if self.is_deepspeed_enabled
                else self.accelerator.prepare_model(reference_team, evaluation_mode=True)
            )
            if args.sync_ref_model:
                self.add_callback(SyncRefModelCallback(ref_model=self.ref_model, accelerator=self.accelerator))

    # Data: a batch is `items_per_device` items, each the root of a whole tree

    def get_train_dataloader(self) -> DataLoader:
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self.args.items_per_device,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        # A batch comes once per micro-batch, as in GRPO: its rollouts are made at the first and used by all
        return EpochSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=1,
            batch_size=self.args.items_per_device * self.accelerator.num_processes,
            repeat_count=self.args.gradient_accumulation_steps,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    # Rollouts

    def collaborate(self, items: Sequence[dict], num_episodes: int = 1) -> list[list[Turn]]:
        """
        Plays episodes with the team as it is, without training on them. Under ZeRO-3 every process must call it, each
        with items of its own or with none.

        Args:
            items (`Sequence[dict]`):
                Dataset rows.
            num_episodes (`int`, *optional*, defaults to `1`):
                Sampled episodes per item.

        Returns:
            `list[list[Turn]]`: The turns of each episode; episode e of item i is entry `i * num_episodes + e`.
        """
        with self.team.evaluating():
            levels = self._play_episodes(
                [dict(item) for item in items for _ in range(num_episodes)], self._sample_alone
            )
        return [[*node.history, node.turn(0)] for node in levels[-1]]

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
        )

    def _play_episodes(
        self, items: list[dict], sample: Callable[[str, list[Node]], list[Samples]]
    ) -> list[list[Node]]:
        return grow_trees(
            items,
            self.environment,
            sample,
            self._score_for_evaluation,
            num_turns=self.args.num_turns,
            num_generations=1,
            discount=self.args.discount,
            process_reward=self._process_reward,
        )

    def _process_reward(self, reward: float) -> float:
        return reward * self.args.reward_scale + self.args.reward_shift

    def _sample(self, role: str, nodes: list[Node]) -> list[Samples]:
        """One agent's completions at all nodes of a turn, in which all processes take part."""
        with self.agent_scope(role):
            prompt_ids = self._tokenize_nodes(role, nodes)
            meet(self.accelerator)  # a process that failed cannot take part in ZeRO-3's gathering of the weights
            return self._complete(role, prompt_ids)

    def _sample_alone(self, role: str, nodes: list[Node]) -> list[Samples]:
        with self.agent_scope(role):
            return self._complete(role, self._tokenize_nodes(role, nodes))

    def _complete(self, role: str, prompt_ids: list[list[int]]) -> list[Samples]:
        """The active agent's completions of each prompt."""
        num_generations = self.args.num_generations if self.model.training else 1
        with self._timed("generate"):
            groups, logps = self._generate_groups(role, prompt_ids, num_generations)
            return [
                Samples(ids, group, self.processing_class.batch_decode(group, skip_special_tokens=True), group_logps)
                for ids, group, group_logps in zip(prompt_ids, groups, logps, strict=True)
            ]

    def _generate_groups(self, role: str, prompt_ids: list[list[int]], num_generations: int) -> tuple[list, list]:
        """Token ids of the completions, and the log-probabilities that vLLM sampled them with."""
        if self.use_vllm:
            step = 0 if role in self.team.frozen else self.state.global_step  # its weights are sent once
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
        """Each node's whole prompt for one agent: its own past prompts and responses, and the new prompt."""
        if not nodes:
            return []
        as_chat = self.args.use_chat_template
        if as_chat is None:
            as_chat = self.processing_class.chat_template is not None
        whole_prompts = [whole_prompt(role, node.history, node.prompts[role], as_chat) for node in nodes]
        prompt_ids = self._tokenize_prompts(whole_prompts)[0]
        if not all(prompt_ids):
            raise ValueError(f"A prompt of agent {role!r} has no tokens: the environment must ask something.")
        return prompt_ids

    def _score(self, nodes: list[Node]) -> list[list[Outcome]]:
        """The environment's outcomes of all joint actions of a turn, for training."""
        return self._judge(nodes, evaluation=False)

    def _score_for_evaluation(self, nodes: list[Node]) -> list[list[Outcome]]:
        """The same outside of training."""
        return self._judge(nodes, evaluation=True)

    def _judge(self, nodes: list[Node], evaluation: bool) -> list[list[Outcome]]:
        if not nodes:
            return []
        owners = [node for node in nodes for _ in node.indices]
        joint_actions = [joint_action for node in nodes for joint_action in node.joint_actions]
        with self._timed("reward"):
            try:
                outcomes = judge(
                    self.environment,
                    [node.item for node in owners],
                    joint_actions,
                    [node.history for node in owners],
                    evaluation,
                )
            except TaskError as error:
                if error.position is None:
                    raise
                item, joint_action = owners[error.position].item, joint_actions[error.position]
                self._stop(str(error), [{"item": item, "completions": joint_action}])
        by_node = iter(outcomes)
        return [[next(by_node) for _ in node.indices] for node in nodes]

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.model.training:  # an evaluation is part of no optimizer step
            self._seconds[phase] += time.perf_counter() - start

    def _prepare_inputs(self, generation_batch: list[dict]) -> dict[str, torch.Tensor]:
        # GRPO shuffles the rows of a generation batch over its optimizer steps. Here all rows go into one step, where
        # their order makes no difference, so siblings stay together and share their prompt
        micro_batches = self.args.gradient_accumulation_steps
        if self._step % micro_batches == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs = split_tensor_dict(batch, micro_batches)
        return self._buffered_inputs[self._step % micro_batches]

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, torch.Tensor]:
        with fail_together(self.accelerator):
            self._levels = self._play_trees(inputs)
        self._log_rollout("train", self._levels)
        return self._rows(self._levels)

    # Rows: the k-th row of a batch holds one completion of every agent

    def _rows(self, levels: list[list[Node]]) -> dict[str, torch.Tensor]:
        """
        The training batch: `"<role>/<name>"` tensors with one row per sibling and the same rows for every agent.

        Frozen agents have none. A sibling whose advantage is zero for all agents adds nothing to a policy gradient, so
        it is left out, unless there is a reference penalty or a router loss. All processes get the same number of rows,
        filled up with rows that are all padding.
        """
        args, roles = self.args, self.team.trained_roles
        rows = []  # (turn, samples by role, sibling, advantages by role)
        nodes = [(turn, node) for turn, nodes in enumerate(levels) for node in nodes]
        nodes.sort(key=lambda turn_and_node: longest_row(turn_and_node[1]))  # little padding within a micro-batch
        for turn, node in nodes:
            returns = torch.tensor([node.agent_returns(self.team.roles.index(role)) for role in roles])
            advantages = sibling_advantages(returns, args.advantage_mode, args.advantage_normalization)
            rows += [(turn, node.samples, g, advantages[:, g]) for g in range(args.num_generations)]
        tokens = [sum(len(samples[role].completion_ids[g]) for _, samples, g, _ in rows) for role in roles]
        keep_all = self.beta != 0.0 or self._router_loss_coefs
        useful = rows if keep_all else [row for row in rows if row[-1].any()]

        # What the processes must agree on: the mean is over all rows, and micro-batches have one size
        sizes = torch.tensor([[len(useful), len(rows), *tokens]], device=self.accelerator.device)
        sizes = self.accelerator.gather(sizes)
        micro_batches = args.gradient_accumulation_steps
        num_rows = micro_batches * max(1, -(-sizes[:, 0].max().item() // micro_batches))
        if self.loss_type != "dapo":  # the other losses are means over the rows of a micro-batch, here partly padding
            self._loss_scale = num_rows * self.accelerator.num_processes / sizes[:, 1].sum().item()

        batch = {}
        padding_rows = num_rows - len(useful)
        weights = torch.tensor([args.turn_gradient_weights[turn] for turn, *_ in useful] + [0.0] * padding_rows)
        for k, role in enumerate(roles):
            tokenizer = self.team.tokenizers[role]
            prompts = [torch.tensor(samples[role].prompt_ids) for _, samples, _, _ in useful]
            completions = [torch.tensor(samples[role].completion_ids[g]) for _, samples, g, _ in useful]
            masks = [torch.ones_like(ids) for ids in completions]
            if args.mask_truncated_completions:
                eos_token_ids = self._agent_attributes[role]["eos_token_ids"]
                masks = [m if ids[-1] in eos_token_ids else 0 * m for m, ids in zip(masks, completions, strict=True)]
            # A row of padding has a prompt of two tokens, one to share and one to continue, and no completion
            tokens_of_padding = torch.tensor([tokenizer.pad_token_id] * 2)
            prompts += [tokens_of_padding] * padding_rows
            completions += [tokens_of_padding] * padding_rows
            masks += [torch.tensor([0, 0])] * padding_rows
            rows_of_agent = {
                "prompt_ids": pad(prompts, tokenizer.pad_token_id, "left"),
                "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], 0, "left"),
                "completion_ids": pad(completions, tokenizer.pad_token_id, "right"),
                "completion_mask": pad(masks, 0, "right"),
                "advantages": torch.stack([row[-1][k] for row in useful] + [torch.tensor(0.0)] * padding_rows),
                "num_items_in_batch": sizes[:, 2 + k].sum(),
            }
            if set(args.turn_gradient_weights) != {1.0}:
                # The mask of tool tokens multiplies the loss of every token, which is what a turn's weight must do
                rows_of_agent["tool_mask"] = weights.unsqueeze(1).expand(rows_of_agent["completion_ids"].shape)
            if self._corrects_sampling:
                logps = [torch.tensor(samples[role].logps[g]) for _, samples, g, _ in useful]
                logps += [torch.zeros(2)] * padding_rows
                rows_of_agent["sampling_per_token_logps"] = pad(logps, 0.0, "right")
            rows_of_agent = {name: x.to(self.accelerator.device) for name, x in rows_of_agent.items()}
            if self.beta != 0.0:
                rows_of_agent["ref_per_token_logps"] = self._reference_logps(role, rows_of_agent)
            if role in self._router_loss_coefs:
                router_weights = torch.tensor([1.0] * len(useful) + [0.0] * padding_rows)
                rows_of_agent["router_weights"] = router_weights.to(self.accelerator.device)
                self._expert_loads[role] = self._expert_load(role, rows_of_agent)
            batch.update({f"{role}/{name}": x for name, x in rows_of_agent.items()})
        return batch

    @torch.no_grad()
    def _reference_logps(self, role: str, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities of one agent's completions under its reference policy, of the shape of the completions."""
        model = self.model_wrapped if self.team.has_adapters else self.ref_model
        agent = self.accelerator.unwrap_model(model).agents[role]
        as_reference = self.team.as_reference if self.team.has_adapters else contextlib.nullcontext
        size = self.args.per_device_train_batch_size
        logps = []
        with as_reference(), self.team.evaluating(), self.accelerator.autocast():
            for start in range(0, len(rows["prompt_ids"]), size):
                chunk = {name: x[start : start + size] for name, x in rows.items() if x.dim() > 0}
                outputs = model(team_inputs={role: forward_inputs(agent, chunk)})
                logps.append(outputs[role].log_probs[:, -chunk["completion_ids"].size(1) :])
        return torch.cat(logps)

    @torch.no_grad()
    def _expert_load(self, role: str, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """How much the batch of all processes sends to each of an agent's experts, see [`~router_loss.expert_load`]."""
        agent = self.team.agents[role]
        size = self.args.per_device_train_batch_size
        sent = 0.0
        with self.team.evaluating(), self.accelerator.autocast():
            for start in range(0, len(rows["prompt_ids"]), size):
                chunk = {name: x[start : start + size] for name, x in rows.items() if x.dim() > 0}
                outputs = self.model_wrapped(team_inputs={role: forward_inputs(agent, trim_padding(chunk))})
                sent = sent + outputs[role].aux_loss[0]
        experts_per_token = agent.config.get_text_config().num_experts_per_tok
        return expert_load(self.accelerator.reduce(sent, "sum"), experts_per_token)

    # Loss: one forward of the team, each agent's loss on its own output, one backward

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = {role: trim_padding(agent_rows(inputs, role)) for role in self.team.trained_roles}
        outputs = model(team_inputs={role: forward_inputs(self.team.agents[role], rows[role]) for role in rows})
        losses = []
        for role in rows:
            if self._corrects_sampling:
                self._correct_sampling(role, outputs[role].log_probs, rows[role])
            with self.agent_scope(role):
                loss = self._compute_loss(lambda role=role, **_: outputs[role], rows[role]) * self._loss_scale
                self._weigh_token_means(role, rows[role])
            if role in self._router_loss_coefs:
                router_loss = self._expert_loads[role] @ outputs[role].aux_loss[1]
                self._step_router_losses[role] += router_loss.detach()
                # The batch's loss is the sum over micro-batches and processes; gradients are averaged over processes
                loss = loss + self._router_loss_coefs[role] * router_loss * self.accelerator.num_processes
            self._step_losses[role] += loss.detach()
            losses.append(loss)
        with fail_together(self.accelerator):  # before the backward, in which processes wait for each other
            for role, loss in zip(rows, losses, strict=True):
                if not loss.isfinite():
                    self._stop(f"The loss of agent {role!r} is {loss.item()}", self._rollout_records())
        return sum(losses)

    def _correct_sampling(self, role: str, logps: torch.Tensor, rows: dict[str, torch.Tensor]) -> None:
        """Adds the factors that make up for vLLM's log-probabilities not being the policy's own."""
        logps, mask = logps[:, -rows["completion_ids"].size(1) :], rows["completion_mask"]
        rows["importance_sampling_ratio"] = sampling_correction(logps, rows, self.args)
        difference = ((logps.detach() - rows["sampling_per_token_logps"]).abs() * mask).nan_to_num(nan=0.0).sum()
        self._step_sums[role, "sampling_logp_difference"] += self.accelerator.reduce(difference, "sum").item()

    def _weigh_token_means(self, role: str, rows: dict[str, torch.Tensor]) -> None:
        """Adds up GRPO's means over the tokens of a micro-batch, which may hold few tokens or none."""
        metrics = self._metrics["train"]
        tokens = self.accelerator.reduce(rows["completion_mask"].sum().float(), "sum").item()
        self._step_tokens[role] += tokens
        for name in ("entropy", "kl") if self.beta != 0.0 else ("entropy",):
            self._step_sums[role, name] += metrics.pop(name)[0] * tokens

    def training_step(self, model, inputs, num_items_in_batch=None):
        rollout = self._seconds["generate"] + self._seconds["reward"]
        with self._timed("step"):
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._seconds["update"] += self._seconds.pop("step") - (
            self._seconds["generate"] + self._seconds["reward"] - rollout
        )
        if self.accelerator.sync_gradients:
            metrics = self._metrics["train"]
            for phase in ("generate", "reward", "update"):
                metrics[f"time/{phase}"].append(self._seconds[phase])
            roles = self.team.trained_roles
            step_losses = torch.stack([self._step_losses[role] for role in roles])
            for role, value in zip(roles, self.accelerator.reduce(step_losses, "mean"), strict=True):
                metrics[f"agents/{role}/loss"].append(value.item())
            for (role, name), total in self._step_sums.items():
                metrics[f"agents/{role}/{name}"].append(total / max(1.0, self._step_tokens[role]))
            for role, value in self._step_router_losses.items():
                metrics[f"agents/{role}/aux_loss"].append(self.accelerator.reduce(value, "sum").item())
            records = [self._seconds, self._step_losses, self._step_tokens, self._step_sums, self._step_router_losses]
            for record in records:
                record.clear()
        return loss

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.use_vllm:
            for generation in self._generations.values():
                generation.loaded_steps.clear()

    # Evaluation: sampled episodes, no loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with fail_together(self.accelerator):
            levels = self._play_episodes(inputs, self._sample)
        self._log_rollout("eval", levels)
        return None, None, None

    # Checkpoints: what was gathered since the last log

    def _process_state(self) -> dict:
        table = {name: list(self._logs[name]) for name in ("prompt", "completion", "advantages")}
        columns = {name: {column: list(x) for column, x in self._logs[name].items()} for name in ("rewards", "extra")}
        return {**super()._process_state(), "env_step": self.env_step, "table": table, "columns": columns}

    def _load_process_state(self, state: dict) -> None:
        super()._load_process_state(state)
        self.env_step = state["env_step"]
        for name, lines in state["table"].items():
            self._logs[name].extend(lines)
        for name, columns in state["columns"].items():
            for column, lines in columns.items():
                self._logs[name][column].extend(lines)

    # Metrics

    def _log_rollout(self, mode: str, levels: list[list[Node]]) -> None:
        """Records the metrics of one batch of trees, over all processes."""
        values = defaultdict(list)
        for turn, nodes in enumerate(levels, start=1):
            for node in nodes:
                values["reward"] += node.rewards
                values[f"turn_{turn}/reward_mean"] += node.rewards
                values[f"turn_{turn}/expected_return"] += node.returns
                if mode == "train":
                    values["frac_reward_zero_std"].append(float(min(node.returns) == max(node.returns)))
                    values[f"turn_{turn}/early_terminated"].append(float(node.ended_early))
                for outcome in node.outcomes:
                    for name, value in outcome.metrics.items():
                        values[f"turn_{turn}/{name}"].append(value)
        num_tokens = 0
        for role in self.team.roles:
            eos_token_ids = self._agent_attributes[role]["eos_token_ids"]
            for node in (node for nodes in levels for node in nodes):
                samples = node.samples[role]
                lengths = [len(ids) for ids in samples.completion_ids]
                values[f"agents/{role}/completions/mean_length"] += lengths
                values[f"agents/{role}/completions/clipped_ratio"] += [
                    float(ids[-1] not in eos_token_ids) for ids in samples.completion_ids
                ]
                num_tokens += len(lengths) * len(samples.prompt_ids) + sum(lengths)

        with fail_together(self.accelerator):
            of_scoring = scoring_metrics(self.environment)
        # One object per process: its processes may have different turns, nodes and metrics
        local = {name: (len(x), sum(x), sum(v * v for v in x)) for name, x in values.items()}
        totals = defaultdict(lambda: (0, 0.0, 0.0))
        of_environment = defaultdict(float)
        for sums, numbers in gather_object([({**local, "num_tokens": (1, num_tokens, 0.0)}, of_scoring)]):
            for name, entry in sums.items():
                totals[name] = tuple(a + b for a, b in zip(totals[name], entry, strict=True))
            for name, value in numbers.items():
                of_environment[name] += value
        _, num_tokens, _ = totals.pop("num_tokens")
        metrics = self._metrics[mode]
        for name, value in of_environment.items():
            metrics[f"reward/{name}"].append(value)
        for name, (count, total, _) in totals.items():
            metrics[name].append(total / count)
        count, total, squares = totals["reward"]
        metrics["reward_std"].append(math.sqrt(max(0.0, squares - total * total / count) / max(1, count - 1)))
        if mode == "train":
            self.state.num_input_tokens_seen += num_tokens
            self.env_step += count
            metrics["env_step"] = [self.env_step]
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        if self.log_completions:
            self._log_table(levels)

    def _log_table(self, levels: list[list[Node]]) -> None:
        """Fills the table of completions: one line per joint action."""
        lines = []
        for turn, nodes in enumerate(levels, start=1):
            for node in nodes:
                baseline = sum(node.returns) / len(node.returns)
                for joint_action, reward, value in zip(node.joint_actions, node.rewards, node.returns, strict=True):
                    prompts = {
                        role: prompt if isinstance(prompt, str) else prompt[-1]["content"]
                        for role, prompt in node.prompts.items()
                    }
                    lines.append((turn, by_role(prompts), by_role(joint_action), reward, value, value - baseline))
        for turn, prompt, completion, reward, value, advantage in gather_object(lines):
            self._logs["prompt"].append(prompt)
            self._logs["completion"].append(completion)
            self._logs["rewards"]["reward"].append(reward)
            self._logs["extra"]["turn"].append(turn)
            self._logs["extra"]["return"].append(value)
            self._logs["advantages"].append(advantage)

    def _rollout_records(self) -> list[dict]:
        return [
            {"item": node.item, "reward": reward, "completions": joint_action}
            for nodes in self._levels
            for node in nodes
            for joint_action, reward in zip(node.joint_actions, node.rewards, strict=True)
        ]

    def _stop(self, problem: str, records: list[dict]) -> None:
        """Ends the run with an error, leaving what led to it in the output folder."""
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"failure_step{self.state.global_step}_process{self.accelerator.process_index}.json"
        report = {"problem": problem, "agents": list(self.team.roles), "joint_actions": records}
        path.write_text(json.dumps(report, indent=2, default=repr) + "\n")
        raise FloatingPointError(f"{problem} at step {self.state.global_step}. Items and completions are in {path}.")


class EpochSampler(RepeatSampler):
    """A [`~trl.trainer.utils.RepeatSampler`] whose order depends only on seed and epoch, so that a run can resume."""

    def set_epoch(self, epoch: int) -> None:
        if self.shuffle:
            self.generator.manual_seed(self.seed + epoch)


def agent_rows(batch: dict[str, torch.Tensor], role: str) -> dict[str, torch.Tensor]:
    """One agent's tensors of a batch, without the role in their names."""
    prefix = f"{role}/"
    return {name.removeprefix(prefix): x for name, x in batch.items() if name.startswith(prefix)}


def trim_padding(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cuts the columns that are padding in every row: left of the prompts, right of the completions."""
    prompt = slice(rows["prompt_mask"].any(dim=0).int().argmax().item(), None)
    # At least two columns: GRPO's metrics take one column for a value per sequence
    completion = slice(None, max(2, int(rows["completion_mask"].any(dim=0).sum())))
    columns = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": completion,
        "completion_mask": completion,
        "tool_mask": completion,
        "ref_per_token_logps": completion,
        "sampling_per_token_logps": completion,
    }
    return {name: x[:, columns[name]] if name in columns else x for name, x in rows.items()}


def forward_inputs(agent: PreTrainedModel, rows: dict[str, torch.Tensor]) -> dict:
    """
    Arguments of an agent's forward that returns the log-probabilities of its completions.

    Siblings that follow each other share their prompt, all but its last token, where the agent can. A router loss counts
    every token of every row, so with one nothing is shared.
    """
    prompt_ids, prompt_mask = rows["prompt_ids"], rows["prompt_mask"]
    has_router_loss = "router_weights" in rows
    sharing = can_share_prompts(agent) and not has_router_loss
    if sharing and prompt_ids.size(1) == 1:
        # Something to share, if only padding: under ZeRO-3 all processes must run the same forward passes
        prompt_ids, prompt_mask = F.pad(prompt_ids, (1, 0)), F.pad(prompt_mask, (1, 0))
    input_ids = torch.cat([prompt_ids, rows["completion_ids"]], dim=1)
    attention_mask = torch.cat([prompt_mask, rows["completion_mask"]], dim=1)
    positions = token_positions(attention_mask)
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    shared = prompt_ids.size(1) - 1
    common = {"fused_lm_head": True, **without_router_logits(agent)}
    if sharing:
        prompts = torch.stack([prompt_ids, prompt_mask, positions[:, : shared + 1]], dim=-1)
        prompts, owners = torch.unique_consecutive(prompts, return_inverse=True, dim=0)
        input_names = ("input_ids", "attention_mask", "position_ids")
        # A row goes from the prompt's last token, which predicts the first of the completion, to the last but one
        return {
            "shared_prompts": dict(zip(input_names, prompts[:, :shared].unbind(-1), strict=True)) | {"owners": owners},
            "input_ids": input_ids[:, shared:-1],
            "attention_mask": attention_mask[:, :-1],
            "position_ids": positions[:, shared:-1],
            "shift_labels": labels[:, shared + 1 :],
            **common,
        }
    labels[:, : shared + 1] = -100
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, **common}
    if has_router_loss:
        inputs["router_weights"] = attention_mask * rows["router_weights"].unsqueeze(1)
    return inputs | {"position_ids": positions} if takes_positions(agent) else inputs


def longest_row(node: Node) -> int:
    """Tokens of the longest prompt with its longest completion at a node."""
    return max(len(samples.prompt_ids) + max(map(len, samples.completion_ids)) for samples in node.samples.values())


def by_role(texts: dict[str, str]) -> str:
    return "\n".join(f"[{role}] {text}" for role, text in texts.items())


@contextlib.contextmanager
def _changed(args: GRPOConfig, **values) -> Iterator[None]:
    """Gives some arguments other values for a while."""
    saved = {name: getattr(args, name) for name in values}
    for name, value in values.items():
        setattr(args, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(args, name, value)

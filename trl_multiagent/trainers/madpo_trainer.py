"""DPO on the joint answers of a team."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import tqdm
from datasets import Dataset, concatenate_datasets
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging
from trl import DPOTrainer
from trl.models import prepare_deepspeed
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from trl_multiagent.environments.base import Environment
from trl_multiagent.jobs.processes import fail_together
from trl_multiagent.models.router_loss import without_router_logits
from trl_multiagent.preferences.rows import (
    CHOSEN_REWARD,
    check_preferences,
    reference_columns,
    roles_of_columns,
    temporary_cache_files,
    text_columns,
)
from trl_multiagent.rollout.episodes import play_episodes
from trl_multiagent.rollout.history import uses_chat_template
from trl_multiagent.rollout.sampler import TeamSampler, sampling_arguments
from trl_multiagent.rollout.tree import Node
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.distribution import without_repeated
from trl_multiagent.trainers.base.generation import TrainerGenerator
from trl_multiagent.trainers.base.log import add_task_metrics
from trl_multiagent.trainers.base.pair_means import PairMeansMixin, first_pairs
from trl_multiagent.trainers.base.rollout_trainer import check_team
from trl_multiagent.trainers.base.run_settings import describe_run
from trl_multiagent.trainers.base.team_config import temporarily_set
from trl_multiagent.trainers.base.team_trainer import TeamTrainerMixin, check_reference_sync, router_loss_coefs
from trl_multiagent.trainers.madpo_config import MADPOConfig
from trl_multiagent.trainers.madpo_data import (
    TOKENS,
    AgentBatch,
    TeamCollator,
    check_form,
    check_lengths,
    join_batches,
    join_outputs,
    sizes_of,
)


logger = logging.get_logger(__name__)

LARGEST_FALL = 0.5  # of the chosen answers' log-probability per token, in nats, without a warning

# Metrics that are means over tokens of chosen answers, of rejected ones, or of both. All others are means over pairs
TOKEN_METRICS = {
    "entropy": ("chosen", "rejected"),
    "logits/chosen": ("chosen",),
    "logits/rejected": ("rejected",),
    "mean_token_accuracy": ("chosen",),
}


class MADPOTrainer(PairMeansMixin, TeamTrainerMixin, DPOTrainer):
    """
    Trainer for Multi-Agent Direct Preference Optimization (MADPO): DPO, introduced in [Direct Preference Optimization:
    Your Language Model is Secretly a Reward Model](https://huggingface.co/papers/2305.18290), on joint answers.

    A row of the dataset compares two joint answers, the chosen c and the rejected r. A joint answer contains one answer
    of every agent i, given its own prompt. Its log-ratio is the sum of those of its parts:

        D = sum over agents i of d_i,    d_i = log pi_i(c_i) / ref_i(c_i) - log pi_i(r_i) / ref_i(r_i)

    and the loss is -log sigmoid(beta * D), or another loss of TRL's as a function of the joint log-ratios. In the
    gradient of agent i, the other agents' log-ratios are constants: they only decide how much the pair counts. The loss
    is computed by TRL, see [`~MADPOTrainer.compute_loss`].

    Args:
        team ([`AgentTeam`]):
            The agents. Their policies at this time are the reference policy.
        args ([`MADPOConfig`], *optional*):
            Configuration. If `None`, the default configuration is used.
        train_dataset ([`~datasets.Dataset`]):
            Joint preferences, see [`~trl_multiagent.preferences.rows`].
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Joint preferences, of which the loss and its metrics are computed; or items of the environment, for each of
            which the team plays an episode. A dictionary may contain datasets of both kinds.
        environment ([`Environment`], *optional*):
            The task, which scores the episodes of an evaluation. It is not used in training.
        callbacks (`list[TrainerCallback]`, *optional*):
            Callbacks, as in any `Trainer`.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and learning rate scheduler for the parameters of the whole team.

    Raises:
        TypeError: A dataset or the environment has the wrong type.
        ValueError: The arguments do not fit the team or each other; a row is malformed or too long.

    Example:

    ```python
    from datasets import Dataset
    from trl_multiagent import AgentTeam, MADPOConfig, MADPOTrainer

    preferences = Dataset.from_list(
        [
            {
                "poet_prompt": "Write a line about rain.",
                "poet_chosen": "Grey threads stitch the sky.",
                "poet_rejected": "Rain is wet.",
                "critic_prompt": "Name one word for rain.",
                "critic_chosen": "threads",
                "critic_rejected": "weather",
            }
        ]
    )
    trainer = MADPOTrainer(
        team=AgentTeam.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", roles=["poet", "critic"]),
        args=MADPOConfig(output_dir="poets"),
        train_dataset=preferences,
    )
    trainer.train()
    ```
    """

    _tag_names = ["trl", "trl-multiagent", "madpo"]
    _name = "MADPO"
    _config_class = MADPOConfig
    _card_settings = [
        "loss_type",
        "loss_weights",
        "beta",
        "reference_free",
        "learning_rate",
        "num_train_epochs",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_length",
        "seed",
    ]

    args: MADPOConfig
    train_dataset: Dataset
    eval_dataset: Any
    loss_types: list[str]
    loss_weights: list[float]
    _is_set_up = False  # whether the agents have been set up
    _sizes: torch.Tensor | None = None  # mean numbers of pairs and of chosen tokens in the step's micro-batches
    _num_micro_batches = 1  # of the step
    _first_chosen_logp: float | None = None  # per token, in the first log of a run without a reference
    _has_warned = False  # that the chosen answers' log-probability fell

    def __init__(
        self,
        team: AgentTeam,
        args: MADPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        environment: Environment | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        if args is None:
            args = self._config_class(f"{team.roles[-1]}-{self._name}")
        if environment is not None:
            check_team(team, environment, None)
        check_reference_sync(team, args)
        self.args, self.environment = args, environment
        self.env_step = 0  # scored joint answers that were trained on, by all processes
        self._sums = {"train": {}, "eval": {}}
        self._eval_losses: list[
            torch.Tensor
        ] = []  # sums and weights of the parts of the loss, of the evaluation that is running
        self._prepare_team(team, args)
        self._router_loss_coefs, self._expert_loads = router_loss_coefs(team, args), {}
        names = {"max_new_tokens": args.max_completion_length, "temperature": args.temperature}
        self.generator = TrainerGenerator(
            self, sampling_arguments({**names, "top_p": args.top_p, "top_k": args.top_k})
        )
        self.sampler = TeamSampler(team, self.generator, args.use_chat_template)
        train_dataset = self._tokenize_pairs(train_dataset, "train_dataset")
        if isinstance(eval_dataset, dict):
            eval_dataset = {
                name: self._tokenize_for_evaluation(dataset, f"eval_dataset[{name!r}]")
                for name, dataset in eval_dataset.items()
            }
        elif eval_dataset is not None:
            eval_dataset = self._tokenize_for_evaluation(eval_dataset, "eval_dataset")
        keeps_reference = not args.reference_free and not args.precompute_ref_log_probs
        reference = self._make_reference() if keeps_reference else None
        self._keeps_reference = keeps_reference
        self._init_dpo(
            args,
            model=team,
            data_collator=TeamCollator(team, args),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=team.tokenizers[team.roles[0]],
            callbacks=callbacks,
            optimizers=optimizers,
        )
        outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
        for model in team.base_models:
            add_fused_lm_head(model, outputs=(*outputs, "log_sum_sq_probs") if args.use_weighting else outputs)
        self._set_up_agents()
        self._set_up_reference(reference)
        self._is_set_up = True
        if args.precompute_ref_log_probs:
            self._store_references()

    def _init_dpo(self, args: MADPOConfig, **kwargs: Any) -> None:
        """Initializes DPOTrainer without what it would do to a single model."""
        # With `precompute_ref_log_probs`, DPOTrainer loads no reference model. `_precompute_ref_logps` ignores its calls
        changes: dict[str, Any] = {"precompute_ref_log_probs": True, "sync_ref_model": False}
        with temporarily_set(args, **changes, disable_dropout=False, router_aux_loss_coef=None):
            super().__init__(args=args, **kwargs)
        # DPOTrainer patched the team's forward to return log-probabilities. The forwards of the agents do that
        del self.team.__dict__["forward"]
        self.precompute_ref_logps = False  # except in `compute_loss`, see there
        self.aux_loss_enabled = False  # DPOTrainer's is computed per micro-batch; see `_router_loss`
        weights = list(zip(self.loss_types, self.loss_weights, strict=True))
        self._agent_loss_types = [name for name, _ in weights if name == "sft"]
        self._agent_loss_weights = [weight for name, weight in weights if name == "sft"]
        self.loss_types = [name for name, _ in weights if name != "sft"]
        self.loss_weights = [weight for name, weight in weights if name != "sft"]

    # Overrides of the team mixin

    def _run_settings(self) -> dict[str, Any]:
        texts = self.train_dataset.remove_columns([f"{role}/{name}" for role in self.team.roles for name in TOKENS])
        return describe_run(self._name, self.team.roles, self.team, texts, self.args)

    def _card_facts(self) -> dict[str, Any]:
        facts = {**super()._card_facts(), "preference pairs": len(self.train_dataset)}
        return {**facts, "env steps": self.env_step} if self._counts_env_steps else facts

    # Data

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, dataset_name: str) -> Dataset:
        # Called by `evaluate`, and by DPOTrainer when it is created, with datasets that are already prepared
        if not self._is_set_up:
            return dataset
        name = "eval_dataset" if dataset_name == "eval" else f"eval_dataset[{dataset_name!r}]"
        dataset = self._tokenize_for_evaluation(dataset, name)
        if self._is_tokenized(dataset) and self.args.precompute_ref_log_probs and not self._has_references(dataset):
            raise ValueError(
                f"`{name}` has no reference log-probabilities, and with `precompute_ref_log_probs=True` the reference "
                "policy is not kept. Pass this dataset when the trainer is created, or set that argument to False."
            )
        return dataset

    def _tokenize_for_evaluation(self, dataset: Dataset, name: str) -> Dataset:
        """Tokenizes preferences; leaves the environment's items as they are."""
        if isinstance(dataset, Dataset) and not roles_of_columns(dataset.column_names):
            if self.environment is None:
                raise ValueError(
                    f"`{name}` has the columns {dataset.column_names}, which are no joint preferences. If these are items "
                    "of a task, pass its `environment` to play them."
                )
            self.sampler.check_items(dataset, self.environment)
            return dataset
        return self._tokenize_pairs(dataset, name)

    def _tokenize_pairs(self, dataset: Dataset, name: str) -> Dataset:
        """
        Checks joint preferences, and adds the columns `"<role>/prompt_ids"`, `"<role>/chosen_ids"` and
        `"<role>/rejected_ids"`.
        """
        if isinstance(dataset, Dataset) and self._is_tokenized(dataset):
            return dataset
        check_preferences(dataset, self.team.roles, name)
        # DPOTrainer takes a column of this name for images
        parts = [dataset.remove_columns([column for column in ("image", "images") if column in dataset.column_names])]
        for role, tokenizer in self.team.tokenizers.items():
            chat_prompts = self.environment is not None and uses_chat_template(tokenizer, self.args.use_chat_template)
            check_form(dataset, role, tokenizer, name, chat_prompts)
            texts = dataset.select_columns(list(text_columns(role)))
            texts = texts.rename_columns(dict(zip(text_columns(role), ("prompt", "chosen", "rejected"), strict=True)))
            self._tokenizer = tokenizer
            with (
                temporary_cache_files(),
                temporarily_set(self.args, max_length=None),
            ):  # rows that are too long are an error, see below
                tokens = super()._prepare_dataset(texts, tokenizer, self.args, f"{name}, {role},")
            tokens = tokens.select_columns(list(TOKENS)).rename_columns({name: f"{role}/{name}" for name in TOKENS})
            parts.append(tokens)
        dataset = concatenate_datasets(parts, axis=1)
        check_lengths(dataset, name, self.team, self.args)
        return dataset

    def _is_tokenized(self, dataset: Dataset) -> bool:
        return f"{self.team.roles[0]}/{TOKENS[0]}" in dataset.column_names

    # Reference policy

    def _has_references(self, dataset: Dataset) -> bool:
        return all(name in dataset.column_names for role in self.team.roles for name in reference_columns(role))

    def _store_references(self) -> None:
        """Adds the columns of the reference log-probabilities to the datasets of preferences that do not have them."""
        args, model = self.args, self.model
        if self.is_deepspeed_enabled:  # as in DPOTrainer: the team itself is prepared when the training begins
            model = prepare_deepspeed(self.model, self.accelerator)
        batch_size = args.precompute_ref_batch_size or args.per_device_train_batch_size
        self.train_dataset = self._with_references(self.train_dataset, model, batch_size)
        batch_size = args.precompute_ref_batch_size or args.per_device_eval_batch_size
        if isinstance(self.eval_dataset, dict):
            for name, dataset in self.eval_dataset.items():
                self.eval_dataset[name] = self._with_references(dataset, model, batch_size)
        elif self.eval_dataset is not None:
            self.eval_dataset = self._with_references(self.eval_dataset, model, batch_size)
        if self.is_deepspeed_enabled:
            model.destroy()  # otherwise its hooks would gather weights in every forward, also in generation

    def _with_references(self, dataset: Dataset, model: torch.nn.Module, batch_size: int) -> Dataset:
        if not self._is_tokenized(dataset) or self._has_references(dataset):
            return dataset
        batches = self.accelerator.prepare(DataLoader(dataset, batch_size=batch_size, collate_fn=self.data_collator))
        logps = []
        for batch in tqdm(batches, desc="Computing reference log-probabilities", disable=self.args.disable_tqdm):
            chosen, rejected = self.compute_ref_log_probs(model, batch)
            logps.append(self.accelerator.gather_for_metrics(torch.stack([chosen, rejected], dim=1)).float().cpu())
        by_role = torch.cat(logps).permute(2, 1, 0)  # role, side, row
        for role, sides in zip(self.team.roles, by_role.tolist(), strict=True):
            for column, values in zip(reference_columns(role), sides, strict=True):
                dataset = dataset.add_column(column, values)
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        # DPOTrainer calls this when it is created. Its method caches the result next to the dataset, which for a dataset
        # in memory is another folder in every process. `_store_references` makes the result part of the dataset
        return dataset

    def compute_ref_log_probs(
        self, model: torch.nn.Module, inputs: dict[str, AgentBatch]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the log-probabilities of every agent's chosen and rejected answers, each of shape `(B, N)`."""
        with torch.no_grad(), self.team.evaluating(), self.accelerator.autocast():
            outputs = model(team_inputs={role: self._forward_inputs(role, inputs[role], False) for role in inputs})
        logps = torch.stack([outputs[role].log_probs.sum(dim=1) for role in inputs], dim=1)
        chosen, rejected = logps.chunk(2, dim=0)
        return chosen, rejected

    def _reference_logps(self, inputs: dict[str, AgentBatch], role: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the log-probabilities of an agent's chosen and rejected answers under its reference policy."""
        batch = inputs[role]
        if self.args.reference_free:
            zeros = torch.zeros(len(batch["input_ids"]) // 2, device=batch["input_ids"].device)
            return zeros, zeros
        if not self._keeps_reference:
            return batch["ref_chosen_logps"], batch["ref_rejected_logps"]
        with self._computing_as_reference() as model:
            outputs = model(team_inputs={role: self._forward_inputs(role, batch, False)})
        chosen, rejected = outputs[role].log_probs.sum(dim=1).chunk(2, dim=0)
        return chosen, rejected

    # Loss

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        # The loss is a mean over the pairs of an optimizer step, or over their tokens. The micro-batches of a step may
        # have different numbers of them
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        sizes = sum(self._count(batch) for batch in batches).to(self.accelerator.device)
        sizes = self.accelerator.reduce(sizes, "sum")
        self._sizes = sizes / (len(batches) * self.accelerator.num_processes)
        self._num_micro_batches = len(batches)
        for role in self._router_loss_coefs:
            inputs = (self._forward_inputs(role, self._prepare_inputs(batch)[role]) for batch in batches)
            self._expert_loads[role] = self._expert_load(role, inputs)
        if self._counts_env_steps:
            self.env_step += self.args.environment_steps_per_pair * round(sizes[0].item())
        return batches, num_items

    def _count(self, batch: dict[str, AgentBatch]) -> torch.Tensor:
        """Counts the pairs of a micro-batch, and the tokens of each agent's chosen answers."""
        sizes = [sizes_of(batch[role]) for role in self.team.roles]
        return torch.stack([sizes[0]["pairs"], *(x["chosen"] for x in sizes)])

    def _num_pairs(self, batch: dict[str, AgentBatch]) -> int:
        return len(batch[self.team.roles[0]]["weights"])

    def _without_rows(self, batch: dict[str, AgentBatch], own: int) -> dict[str, AgentBatch]:
        return {role: first_pairs(of_role, own) for role, of_role in batch.items()}

    @property
    def _counts_env_steps(self) -> bool:
        return self.args.use_environment_step and CHOSEN_REWARD in self.train_dataset.column_names

    def _forward_inputs(self, role: str, batch: AgentBatch, with_router_loss: bool = True) -> dict[str, Any]:
        """Builds the arguments of an agent's forward that returns the log-probabilities of its answers."""
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
        inputs |= without_router_logits(self.team.agents[role])
        if with_router_loss and role in self._router_loss_coefs:
            inputs["router_weights"] = batch["attention_mask"] * batch["weights"].repeat(2)[:, None]
        return {**inputs, "fused_lm_head": True}

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, AgentBatch],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Computes the loss of the pairs of a micro-batch: the mean over the pairs of l(D), see [`MADPOTrainer`].

        TRL computes l from a policy's log-probabilities of every token. It gets those of all agents, one agent after
        the other, as if a joint answer were one long text. Their sum over the text is the joint log-probability. The
        loss types that divide by the length of an answer divide by that of the joint answer.

        The loss type `"sft"` is the sum over the agents of TRL's loss on their own chosen answers. A frozen agent has
        none, and its answers enter D as a constant, which is 0 unless the training is `reference_free`.

        Raises:
            FloatingPointError: The loss is not finite; the texts are written to the output folder.
        """
        references = {}
        for role in self.team.trained_roles:
            references[role] = self._reference_logps(inputs, role)
        outputs = model(team_inputs={role: self._forward_inputs(role, inputs[role]) for role in self.team.roles})
        for role in self.team.frozen:
            outputs[role] = FusedCausalLMOutput(
                **{name: x.detach() for name, x in outputs[role].items() if x is not None}
            )
            references[role] = outputs[role].log_probs.sum(dim=1).chunk(2, dim=0)
            if self.args.reference_free:
                references[role] = self._reference_logps(inputs, role)

        sizes = self._count(inputs)
        joint_inputs = join_batches([inputs[role] for role in self.team.roles], list(references.values()))
        joint_outputs = join_outputs([outputs[role] for role in self.team.roles])
        # The reference log-probabilities are in the inputs
        with (
            self._counting_tokens(bool(sizes[0] > 0)),
            self._local_metrics() as metrics,
            temporarily_set(self, precompute_ref_logps=True),
        ):
            agent_losses = {
                role: self._agent_loss(role, outputs[role], inputs[role], references[role])
                for role in self.team.trained_roles
            }
            joint_loss = self._compute_loss(lambda **_: joint_outputs, joint_inputs, False)
        parts = [joint_loss, *(agent_losses.get(role, 0.0) for role in self.team.roles)]
        parts = torch.stack([torch.as_tensor(x).to(sizes) for x in parts])  # means over pairs, and over tokens
        metrics["logps/chosen_change"] = [self._change_of_chosen(joint_outputs, joint_inputs)]
        self._add_metrics(metrics, inputs, joint_inputs)
        if self.model.training:
            scales = sizes / self._sizes if self._sizes is not None else torch.ones_like(sizes)
            loss = (scales * parts).sum()
            for role in self._router_loss_coefs:
                loss = loss + self._scaled_router_loss(role, outputs[role].aux_loss)
        else:
            loss = parts.sum()
            self._eval_losses.append(torch.stack([parts.detach() * sizes, sizes]))
        with fail_together(self.accelerator):  # before the backward pass, whose collectives would wait forever
            if not loss.isfinite():
                self._abort_with_report(f"The loss is {loss.item()}", pairs=self._texts(inputs))
        return loss

    def _agent_loss(
        self,
        role: str,
        outputs: FusedCausalLMOutput,
        batch: AgentBatch,
        reference: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Computes the terms of the loss that are an agent's own, and the agent's metrics."""
        batch = {**batch, "ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1]}
        # The tokens are counted once, with the joint answers
        own = {
            "loss_types": self._agent_loss_types,
            "loss_weights": self._agent_loss_weights,
            "_total_train_tokens": 0,
        }
        with self.agent_metrics(role), temporarily_set(self, **own):
            return self._compute_loss(lambda **_: outputs, batch, False)

    def _add_metrics(
        self, metrics: dict[str, list[float]], inputs: dict[str, AgentBatch], joint_inputs: AgentBatch
    ) -> None:
        """Adds TRL's metrics of this process's micro-batch to those that are logged next."""
        agent_sizes = {role: sizes_of(batch) for role, batch in inputs.items()}
        joint_sizes = sizes_of(joint_inputs)
        means = {}
        for name, (value,) in metrics.items():
            if not name.endswith("num_tokens"):
                sizes = agent_sizes[name.split("/")[1]] if name.startswith("agents/") else joint_sizes
                kinds = next((x for metric, x in TOKEN_METRICS.items() if name.endswith(metric)), ("pairs",))
                means[name] = value, sum(sizes[kind].item() for kind in kinds)
        self._add_means(means)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
        if self.args.reference_free:
            change = self._metrics[mode]["logps/chosen_change"]
            if self._first_chosen_logp is None:
                self._first_chosen_logp = change[0]
            change[0] -= self._first_chosen_logp

    def _scaled_router_loss(self, role: str, expert_sums: torch.Tensor) -> torch.Tensor:
        """Computes the part of a micro-batch in an agent's router loss, and adds it to the metrics."""
        # The loss is a sum over micro-batches and processes, of which gradients are means
        router_loss = self._router_loss(role, expert_sums) * self._num_micro_batches * self.accelerator.num_processes
        mean = self.accelerator.reduce(router_loss.detach(), "mean").item()
        self._metrics["train"][f"agents/{role}/aux_loss"].append(mean)
        return self._router_loss_coefs[role] * router_loss

    def _texts(self, inputs: dict[str, AgentBatch]) -> list[dict[str, str]]:
        """Returns the texts of a micro-batch for a failure report."""
        size = len(inputs[self.team.roles[0]]["input_ids"]) // 2
        records: list[dict[str, str]] = [{} for _ in range(size)]
        for role, tokenizer in self.team.tokenizers.items():
            texts = tokenizer.batch_decode(inputs[role]["input_ids"], skip_special_tokens=True)
            for k, record in enumerate(records):
                record |= {f"{role} chosen": texts[k], f"{role} rejected": texts[size + k]}
        return records

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, AgentBatch] | list[dict],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, None, None]:
        if isinstance(inputs, list):
            self._play(without_repeated(self.accelerator, inputs))
            return None, None, None
        length = len(self.accelerator.gradient_state.active_dataloader.dataset)
        inputs = self._keep_own_rows(inputs, self._num_pairs(inputs), length)
        return super().prediction_step(model, inputs, True, ignore_keys)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self._eval_losses = []
        self._sums["eval"].clear()
        output = super().evaluation_loop(*args, **kwargs)
        if self._eval_losses:  # the mean over pairs and tokens, where that of `Trainer` is over batches
            totals, sizes = self.accelerator.reduce(torch.stack(self._eval_losses).sum(dim=0), "sum")
            output.metrics[f"{kwargs['metric_key_prefix']}_loss"] = (totals / sizes.clamp(min=1)).sum().item()
        return output

    def _play(self, items: list[dict]) -> None:
        """Plays an episode per item of the environment, and adds its metrics to those that are logged next."""
        with fail_together(self.accelerator):
            levels = self._play_episodes(items)
        add_task_metrics(self, "eval", levels)

    def _play_episodes(self, items: list[dict], num_episodes: int = 1) -> list[list[Node]]:
        """Plays sampled episodes of the environment; returns the nodes of every turn."""
        return play_episodes(
            items, self.environment, self.sampler, num_turns=self.args.num_turns, num_episodes=num_episodes
        )

    # Metrics and checkpoints

    @torch.no_grad()
    def _change_of_chosen(self, outputs: FusedCausalLMOutput, inputs: AgentBatch) -> float:
        """
        Computes the mean over pairs of the chosen answer's log-probability per token, less that under the reference policy if there is one.
        """
        num_pairs = len(inputs["ref_chosen_logps"])
        logps = outputs.log_probs[:num_pairs].sum(dim=1) - inputs["ref_chosen_logps"]
        return (logps / inputs["completion_mask"][:num_pairs].sum(dim=1).clamp(min=1)).mean().item()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics = self._metrics["train"]
        if self.model.training and "logps/chosen_change" in metrics:
            if self._counts_env_steps:
                metrics["env_step"] = [self.env_step]
            fall = -metrics["logps/chosen_change"][0]
            if fall > LARGEST_FALL and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    f"The log-probability of the chosen answers has fallen by {fall:.2f} per token since the start of "
                    f"the training (step {self.state.global_step}): the team unlearns what it should learn. Lower "
                    "`learning_rate`, raise `beta`, or add the loss type 'sft'."
                )
        super().log(logs, start_time)

    def _process_state(self) -> dict[str, Any]:
        state = {"env_step": self.env_step, "num_tokens": self._total_train_tokens, "has_warned": self._has_warned}
        return {**super()._process_state(), **state, "first_chosen_logp": self._first_chosen_logp, "sums": self._sums}

    def _load_process_state(self, state: dict[str, Any]) -> None:
        super()._load_process_state(state)
        self.env_step, self._total_train_tokens = state["env_step"], state["num_tokens"]
        self._has_warned, self._first_chosen_logp = state["has_warned"], state["first_chosen_logp"]
        self._sums = state["sums"]

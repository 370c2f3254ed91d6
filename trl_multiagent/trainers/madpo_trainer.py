"""DPO on the joint answers of a team."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import tqdm
from datasets import Dataset, concatenate_datasets
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging
from trl import DPOTrainer
from trl.models import prepare_deepspeed
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import add_fused_lm_head

from trl_multiagent.environments.base import Environment
from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.models.pretrained import check_length
from trl_multiagent.models.router_loss import without_router_logits
from trl_multiagent.preferences.rows import (
    CHOSEN_REWARD,
    check_preferences,
    reference_columns,
    roles_of_columns,
    temporary_cache_files,
    text_columns,
)
from trl_multiagent.rollout.history import uses_chat_template
from trl_multiagent.rollout.sampler import TeamSampler, sampling_arguments
from trl_multiagent.rollout.tree import Node, play_episodes
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.checkpoints import describe_run
from trl_multiagent.trainers.base.metrics import add_task_metrics
from trl_multiagent.trainers.base.pair_means import PairMeansMixin, first_pairs
from trl_multiagent.trainers.base.rollout_trainer import check_team
from trl_multiagent.trainers.base.team_config import temporarily_set
from trl_multiagent.trainers.base.team_trainer import TeamTrainerMixin, TrainerGenerator, router_loss_coefs
from trl_multiagent.trainers.madpo_config import MADPOConfig
from trl_multiagent.trainers.madpo_loss import Answers, preference_losses


logger = logging.get_logger(__name__)

TOKENS = ("prompt_ids", "chosen_ids", "rejected_ids")  # an agent's columns from TRL's tokenization
LARGEST_FALL = 0.5  # a larger fall of the chosen answers' log-probability per token, in nats, causes a warning

# The result of `DataCollatorForPreference` for one agent, and "weights": 1 for a pair, 0 for a repeated one
AgentBatch = dict[str, torch.Tensor]


class MADPOTrainer(PairMeansMixin, TeamTrainerMixin, DPOTrainer):
    """
    Trainer for Multi-Agent Direct Preference Optimization (MADPO): DPO, introduced in [Direct Preference Optimization:
    Your Language Model is Secretly a Reward Model](https://huggingface.co/papers/2305.18290), on joint answers.

    A row of the dataset compares two joint answers, the chosen c and the rejected r. A joint answer contains one
    answer of every agent i to its own prompt. Its log-ratio is the sum of the agents' log-ratios:

        D = sum over agents i of d_i,    d_i = log pi_i(c_i) / ref_i(c_i) - log pi_i(r_i) / ref_i(r_i)

    and the loss is -log sigmoid(beta * D), or another function of the joint log-ratios, see [`~trainers.madpo_loss`].
    In the gradient of agent i, the other agents' log-ratios are constants: they only decide how much the pair counts.

    Args:
        team ([`AgentTeam`]): The agents. Their policies at this time are the reference policy.
        args ([`MADPOConfig`], *optional*): Configuration. If `None`, the default configuration is used.
        train_dataset ([`~datasets.Dataset`]): Joint preferences, see [`~trl_multiagent.preferences.rows`].
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Joint preferences, for which the loss and its metrics are computed; or items of the environment, for which
            the team plays one episode each. A dictionary may contain datasets of both kinds.
        environment ([`Environment`], *optional*):
            The task, which scores the episodes of an evaluation. It is not used in training.
        callbacks (`list[TrainerCallback]`, *optional*): Callbacks, as in any `Trainer`.
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
    _card_settings = ["loss_type", "loss_weights", "beta", "reference_free", "learning_rate", "num_train_epochs"]
    _card_settings += ["per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "seed"]

    args: MADPOConfig
    train_dataset: Dataset
    eval_dataset: Any
    _num_parts: int  # number of micro-batches of the step, over all processes

    def __init__(
        self,
        team: AgentTeam,
        args: MADPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        environment: Environment | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ):
        args = self._checked(team, args)
        if environment is not None:
            check_team(team, environment, None)
        self.args, self.environment = args, environment
        self.env_step = 0  # scored joint answers in training, over all processes
        self._sums = {"train": {}, "eval": {}}
        self._eval_losses: list[torch.Tensor] = []  # sums and their sizes in the current evaluation
        self._prepare_team(team, args)
        self._router_loss_coefs, self._expert_loads = router_loss_coefs(team, args), {}
        sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
        sampling["max_new_tokens"] = args.max_completion_length
        self.generator = TrainerGenerator(self, sampling_arguments(sampling))
        self.sampler = TeamSampler(team, self.generator, args.use_chat_template)
        train_dataset = self._prepare_dataset(train_dataset, None, args, "train")
        self._keeps_reference = not args.reference_free and not args.precompute_ref_log_probs
        reference = self._make_reference() if self._keeps_reference else None
        # DPOTrainer must not set up a single model. With `precompute_ref_log_probs`, it loads no reference model
        changes: dict[str, Any] = {"precompute_ref_log_probs": True, "disable_dropout": False}
        with temporarily_set(args, **changes, router_aux_loss_coef=None):
            super().__init__(
                args=args,
                model=team,
                data_collator=TeamCollator(team, args),
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=team.tokenizers[team.roles[0]],
                callbacks=callbacks,
                optimizers=optimizers,
            )
        self.precompute_ref_logps = False
        del team.__dict__["forward"]  # DPOTrainer patched it. Here, the agents' forwards return log-probabilities
        outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
        for model in team.base_models:
            add_fused_lm_head(model, outputs=(*outputs, "log_sum_sq_probs") if args.use_weighting else outputs)
        self._set_up_agents()
        self._set_up_reference(reference)
        if args.precompute_ref_log_probs:
            self._store_references()

    # Overrides of the team mixin

    def _run_settings(self) -> dict[str, Any]:
        texts = self.train_dataset.remove_columns([f"{role}/{name}" for role in self.team.roles for name in TOKENS])
        return describe_run(self._name, self.team.roles, self.team, texts, self.args)

    def _card_facts(self) -> dict[str, Any]:
        env_steps = {"env steps": self.env_step} if self._counts_env_steps else {}
        return {**super()._card_facts(), "preference pairs": len(self.train_dataset), **env_steps}

    # Data

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, dataset_name: str) -> Dataset:
        """
        Checks joint preferences, and adds the columns `"<role>/prompt_ids"`, `"<role>/chosen_ids"` and
        `"<role>/rejected_ids"`. Items of the environment, which an evaluation may have, are not changed. DPOTrainer
        calls this method for each of its datasets.
        """
        name = f"{dataset_name}_dataset" if dataset_name in ("train", "eval") else f"eval_dataset[{dataset_name!r}]"
        if self._is_tokenized(dataset):
            return dataset
        if dataset_name != "train" and self.environment is not None and not roles_of_columns(dataset.column_names):
            self.sampler.check_items(dataset, self.environment)
            return dataset
        check_preferences(dataset, self.team.roles, name)
        # DPOTrainer takes a column of this name for images
        parts = [dataset.remove_columns([column for column in ("image", "images") if column in dataset.column_names])]
        for role, tokenizer in self.team.tokenizers.items():
            chat_prompts = self.environment is not None and uses_chat_template(tokenizer, args.use_chat_template)
            check_form(dataset, role, tokenizer, name, chat_prompts)
            texts = dataset.select_columns(list(text_columns(role)))
            texts = texts.rename_columns(dict(zip(text_columns(role), ("prompt", "chosen", "rejected"), strict=True)))
            self._tokenizer = tokenizer
            with temporary_cache_files(), temporarily_set(args, max_length=None):  # `check_lengths` applies it
                tokens = super()._prepare_dataset(texts, tokenizer, args, f"{name}, {role},")
            tokens = tokens.select_columns(list(TOKENS)).rename_columns({name: f"{role}/{name}" for name in TOKENS})
            parts.append(tokens)
        dataset = concatenate_datasets(parts, axis=1)
        check_lengths(dataset, name, self.team, args)
        return dataset

    def _is_tokenized(self, dataset: Any) -> bool:
        return isinstance(dataset, Dataset) and f"{self.team.roles[0]}/{TOKENS[0]}" in dataset.column_names

    # Reference policy

    def _store_references(self) -> None:
        """Adds the columns of the reference log-probabilities to the datasets of preferences that do not have them."""
        model, evaluated = self.model, self.eval_dataset
        if self.is_deepspeed_enabled:  # as in DPOTrainer: the team itself is prepared when the training begins
            model = prepare_deepspeed(self.model, self.accelerator)
        self.train_dataset = self._with_references(self.train_dataset, model)
        if isinstance(evaluated, dict):
            self.eval_dataset = {name: self._with_references(x, model) for name, x in evaluated.items()}
        else:
            self.eval_dataset = self._with_references(evaluated, model)
        if self.is_deepspeed_enabled:
            model.destroy()  # otherwise its hooks would gather weights in every forward, also in generation

    def _with_references(self, dataset: Any, model: torch.nn.Module) -> Any:
        names = [name for role in self.team.roles for name in reference_columns(role)]
        if not self._is_tokenized(dataset) or names[0] in dataset.column_names:  # all of them are there, or none
            return dataset
        batch_size = self.args.precompute_ref_batch_size or self.args.per_device_train_batch_size
        batches = self.accelerator.prepare(DataLoader(dataset, batch_size=batch_size, collate_fn=self.data_collator))
        logps = []
        for batch in tqdm(batches, desc="Computing reference log-probabilities", disable=self.args.disable_tqdm):
            with torch.no_grad(), self.team.evaluating(), self.accelerator.autocast():
                outputs = model(team_inputs={role: self._forward_inputs(role, batch[role], False) for role in batch})
            answers = (outputs[role].log_probs.sum(dim=1).chunk(2) for role in batch)  # chosen and rejected
            columns = torch.stack([side for sides in answers for side in sides], dim=1)
            logps.append(self.accelerator.gather_for_metrics(columns).float().cpu())
        columns = Dataset.from_dict(dict(zip(names, torch.cat(logps).T.tolist(), strict=True)))
        return concatenate_datasets([dataset, columns], axis=1)

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        # DPOTrainer calls this when it is created. Its method caches the result next to the dataset. For a dataset in
        # memory, that is a different folder in every process. `_store_references` adds the result to the dataset
        # instead
        return dataset

    def _reference_logps(self, inputs: dict[str, AgentBatch], role: str) -> torch.Tensor:
        """
        Returns the log-probabilities of an agent's answers under its reference policy, of shape `(2B,)`; zeros without
        a reference.
        """
        batch = inputs[role]
        if self.args.reference_free:
            return torch.zeros(len(batch["input_ids"]), device=batch["input_ids"].device)
        if not self._keeps_reference:
            if "ref_chosen_logps" not in batch:
                raise ValueError(
                    "`eval_dataset` has no reference log-probabilities: pass it when the trainer is created, or set "
                    "`precompute_ref_log_probs` to False."
                )
            return torch.cat([batch["ref_chosen_logps"], batch["ref_rejected_logps"]])
        with self._computing_as_reference() as model:
            outputs = model(team_inputs={role: self._forward_inputs(role, batch, False)})
        return outputs[role].log_probs.sum(dim=1)

    # Loss

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._num_parts = len(batches) * self.accelerator.num_processes
        for role in self._router_loss_coefs:
            inputs = (self._forward_inputs(role, self._prepare_inputs(batch)[role]) for batch in batches)
            self._expert_loads[role] = self._expert_load(role, inputs)
        if self._counts_env_steps:
            self.env_step += self.args.environment_steps_per_pair * round(self._sizes[0].item() * self._num_parts)
        return batches, num_items

    def _count(self, batch: dict[str, AgentBatch]) -> torch.Tensor:
        """Counts the pairs of a micro-batch, and the tokens of each agent's chosen answers."""
        weights = self._weights(batch)
        tokens = (batch[role]["completion_mask"].chunk(2)[0].sum(dim=1) for role in self.team.roles)
        return torch.stack([weights.sum(), *((x * weights).sum() for x in tokens)])

    def _weights(self, batch: dict[str, AgentBatch]) -> torch.Tensor:
        return batch[self.team.roles[0]]["weights"]

    def _without_rows(self, batch: dict[str, AgentBatch], own: int) -> dict[str, AgentBatch]:
        return {role: first_pairs(agent_batch, own) for role, agent_batch in batch.items()}

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

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, AgentBatch], *args: Any, **kwargs: Any) -> Any:
        """
        Computes the loss of a micro-batch, so that the mean over micro-batches and processes is

            mean over the pairs of the optimizer step of l(D)  +  weight of "sft" * sum over agents of L_i,

        with l from [`~trainers.madpo_loss`], and L_i the mean negative log-probability of the tokens of agent i's
        chosen answers. A frozen agent has no L_i, and its answers enter D as a constant, which is 0 unless the
        training is `reference_free`.

        Raises:
            FloatingPointError: The loss is not finite; the texts are written to the output folder.
        """
        references = {role: self._reference_logps(inputs, role) for role in self.team.trained_roles}
        outputs = model(team_inputs={role: self._forward_inputs(role, inputs[role]) for role in self.team.roles})
        for role in self.team.frozen:
            outputs[role].log_probs = outputs[role].log_probs.detach()
            own = outputs[role].log_probs.sum(dim=1)
            references[role] = torch.zeros_like(own) if self.args.reference_free else own
        answers = {role: Answers.of_agent(outputs[role], references[role]) for role in self.team.roles}
        joint = Answers.joint(answers.values())

        weights, sizes = self._weights(inputs), self._count(inputs)
        sums = [(preference_losses(joint, self.args) * weights).sum()]
        sft = sum(weight for name, weight in self.args.weighted_losses if name == "sft")
        for role, agent_answers in answers.items():
            logps = (agent_answers.logps.chunk(2)[0] * weights).sum()
            sums.append(-sft * logps * (role in self.team.trained_roles))
        sums = torch.stack(sums)  # over pairs, and over each agent's chosen tokens
        self._add_metrics(inputs, answers, joint)
        if self.model.training:
            loss = (sums / self._sizes).sum()
            for role in self._router_loss_coefs:
                loss = loss + self._scaled_router_loss(role, outputs[role].aux_loss)
        else:
            loss = (sums / sizes.clamp(min=1)).sum()
            self._eval_losses.append(torch.stack([sums.detach(), sizes]))
        with fail_together(self.accelerator):  # before the backward pass, whose collectives would wait forever
            if not loss.isfinite():
                self._abort_with_report(f"The loss is {loss.item()}", pairs=self._texts(inputs))
        return loss

    def _add_metrics(self, inputs: dict[str, AgentBatch], answers: dict[str, Answers], joint: Answers) -> None:
        """Adds the metrics of this process's micro-batch to the next log entry."""
        weights = self._weights(inputs)
        means = joint.metrics(weights, self.args.beta)
        for role in self.team.trained_roles:
            agent_means = answers[role].metrics(weights, self.args.beta)
            del agent_means["logps/chosen_change"]
            means |= {f"agents/{role}/{name}": mean for name, mean in agent_means.items()}
        if self.args.reference_free:
            del means["logps/chosen_change"]
        self._add_means(means)
        self._count_tokens(sum(batch["attention_mask"].sum() for batch in inputs.values()) * weights.any())

    def _scaled_router_loss(self, role: str, expert_sums: torch.Tensor) -> torch.Tensor:
        """Computes the part of a micro-batch in an agent's router loss, and adds it to the metrics."""
        # The loss is a sum over micro-batches and processes, but gradients are means over both
        router_loss = self._router_loss(role, expert_sums) * self._num_parts
        mean = self.accelerator.reduce(router_loss.detach(), "mean").item()
        self._metrics["train"][f"agents/{role}/aux_loss"].append(mean)
        return self._router_loss_coefs[role] * router_loss

    def _texts(self, inputs: dict[str, AgentBatch]) -> list[dict[str, str]]:
        """Returns the texts of a micro-batch for a failure report."""
        number = len(self._weights(inputs))
        columns: dict[str, list[str]] = {}
        for role, tokenizer in self.team.tokenizers.items():
            texts = tokenizer.batch_decode(inputs[role]["input_ids"], skip_special_tokens=True)
            columns |= {f"{role} chosen": texts[:number], f"{role} rejected": texts[number:]}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def prediction_step(
        self, model: torch.nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, None, None]:
        if isinstance(inputs, list):
            add_task_metrics(self, "eval", self._play_evaluation(inputs))
            return None, None, None
        length = len(self.accelerator.gradient_state.active_dataloader.dataset)
        return super().prediction_step(model, self._keep_own_rows(inputs, length), True, ignore_keys)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self._eval_losses = []
        self._sums["eval"].clear()
        output = super().evaluation_loop(*args, **kwargs)
        if self._eval_losses:  # the mean over pairs and tokens, unlike that of `Trainer`, which is over batches
            totals, sizes = self.accelerator.reduce(torch.stack(self._eval_losses).sum(dim=0), "sum")
            output.metrics[f"{kwargs['metric_key_prefix']}_loss"] = (totals / sizes.clamp(min=1)).sum().item()
        return output

    def _play_episodes(self, items: list[dict], num_episodes: int, stream: str, first: int = 0) -> list[list[Node]]:
        turns, numbers = self.args.num_turns, range(first, first + len(items))
        with temporarily_set(self.sampler, stream=stream):
            return play_episodes(
                items, self.environment, self.sampler, num_turns=turns, num_episodes=num_episodes, numbers=numbers
            )

    # Metrics and checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics = self._metrics["train"]
        if self.model.training and metrics:
            if self._counts_env_steps:
                metrics["env_step"] = [self.env_step]
            if metrics.get("logps/chosen_change", [0.0])[0] < -LARGEST_FALL:
                logger.warning_once(
                    f"The log-probability of the chosen answers has fallen by more than {LARGEST_FALL} per token. "
                    "Lower `learning_rate`, raise `beta`, or add the loss type 'sft'."
                )
        super().log(logs, start_time)

    def _process_state(self) -> dict[str, Any]:
        return {**super()._process_state(), "env_step": self.env_step}

    def _load_process_state(self, state: dict[str, Any]) -> None:
        super()._load_process_state(state)
        self.env_step = state["env_step"]


# The tokens of all agents


def check_form(dataset: Dataset, role: str, tokenizer: PreTrainedTokenizerBase, name: str, chat_prompts: bool) -> None:
    """
    Raises `ValueError` for chat messages without a chat template. Warns about texts if the environment's prompts are
    chat messages.
    """
    prompt = text_columns(role)[0]
    is_text, where = isinstance(dataset[0][prompt], str), f"`{name}`: {prompt!r} has"
    if not is_text and tokenizer.chat_template is None:
        raise ValueError(f"{where} chat messages, but the tokenizer of {role!r} has no chat template.")
    if is_text and chat_prompts:
        logger.warning(
            f"{where} texts, but the environment has chat messages, so the training sees other prompts than the "
            "evaluation. Write messages, or set `use_chat_template=False`."
        )


def check_lengths(dataset: Dataset, name: str, team: AgentTeam, args: MADPOConfig) -> None:
    """
    Raises `ValueError` if a row has no tokens to train on, or more than a model can read. Warns if `max_length` cuts
    answers.
    """
    num_cut, limit = 0, args.max_length or math.inf
    for role in team.roles:
        columns = [f"{role}/{token_ids}" for token_ids in TOKENS]
        for index, row in enumerate(dataset.select_columns(columns)):
            prompt, *answers = lengths = [len(row[column]) for column in columns]
            whole, place = prompt + max(answers), f"Row {index} of `{name}`"
            if 0 in lengths:
                raise ValueError(f"{place}: {text_columns(role)[lengths.index(0)]!r} has no tokens.")
            check_length(f"{place}: prompt and answer of {role!r}", team.agents[role], min(whole, limit))
            if prompt >= limit:
                problem = (
                    f"has {prompt} tokens, which leaves no token of the answers within the `max_length` of {limit}"
                )
                raise ValueError(f"{place}: {text_columns(role)[0]!r} {problem}.")
            num_cut += whole > limit
    if num_cut > 0:
        logger.warning(
            f"{num_cut} pairs of answers in `{name}` are longer than the `max_length` of {limit} tokens: their ends "
            "are not trained."
        )


class TeamCollator:
    """
    Makes a batch of tokenized preferences with TRL's collator for the columns of every role. Items of a task stay a
    list.
    """

    def __init__(self, team: AgentTeam, args: MADPOConfig):
        lengths = {"max_length": args.max_length, "pad_to_multiple_of": args.pad_to_multiple_of}
        self.collators = {
            role: DataCollatorForPreference(pad_token_id=tokenizer.pad_token_id, **lengths)
            for role, tokenizer in team.tokenizers.items()
        }

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, AgentBatch] | list[dict[str, Any]]:
        if not any(name.endswith(f"/{TOKENS[0]}") for name in rows[0]):
            return rows
        return {
            role: {**collate([self._columns_of_agent(row, role) for row in rows]), "weights": torch.ones(len(rows))}
            for role, collate in self.collators.items()
        }

    def _columns_of_agent(self, row: dict[str, Any], role: str) -> dict[str, Any]:
        columns = {name: row[f"{role}/{name}"] for name in TOKENS}
        return columns | {x.removeprefix(f"{role}_"): row[x] for x in reference_columns(role) if x in row}

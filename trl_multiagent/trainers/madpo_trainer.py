"""DPO on the joint answers of a team."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import TrainerCallback
from transformers.trainer_utils import PredictionOutput
from transformers.utils import logging
from trl import DPOTrainer
from trl.data_utils import _tokenize, common_prefix_length
from trl.trainer.utils import FusedCausalLMOutput

from trl_multiagent.environments.base import Environment, ScoringContext, scoring
from trl_multiagent.jobs.distributed import fail_together
from trl_multiagent.limits import explained
from trl_multiagent.models.chat_markers import CONTENT
from trl_multiagent.models.pretrained import check_length, temporarily_set
from trl_multiagent.models.reasoning import CompletionReader
from trl_multiagent.preferences.rows import (
    CHOSEN_REWARD,
    PairRow,
    check_preferences,
    ids_columns,
    roles_of_columns,
    temporary_cache_files,
    text_columns,
    text_of,
)
from trl_multiagent.rollout.history import tokenize_prompts, uses_chat_template
from trl_multiagent.rollout.sampler import TeamSampler
from trl_multiagent.rollout.sampling_arguments import sampling_of
from trl_multiagent.rollout.tree import Samples, Trees, judge_nodes, play_episodes
from trl_multiagent.team.agent_team import AgentTeam
from trl_multiagent.trainers.base.batch import AgentTensors, Row, agent_tensors, forward_inputs
from trl_multiagent.trainers.base.checkpoints import describe_run
from trl_multiagent.trainers.base.failures import end_with_report
from trl_multiagent.trainers.base.metrics import add_task_metrics
from trl_multiagent.trainers.base.pair_means import PairMeansMixin
from trl_multiagent.trainers.base.rollout_trainer import check_team
from trl_multiagent.trainers.base.team_trainer import TeamTrainerMixin, TrainerGenerator
from trl_multiagent.trainers.madpo_config import MADPOConfig


logger = logging.get_logger(__name__)

TOKENS = ("prompt_ids", "chosen_ids", "rejected_ids")  # an agent's columns of token ids

# The rows of each agent: all chosen answers, then all rejected ones. And "weights": 1 for a pair, 0 for a repeated one
PairBatch = dict[str, Any]


@explained
class MADPOTrainer(PairMeansMixin, TeamTrainerMixin, DPOTrainer):
    """
    Trainer for Multi-Agent Direct Preference Optimization (MADPO): DPO, introduced in [Direct Preference Optimization:
    Your Language Model is Secretly a Reward Model](https://huggingface.co/papers/2305.18290), on joint answers.

    A row of the dataset compares two joint answers, the chosen c and the rejected r. A joint answer contains one
    answer of every agent i to its own prompt. Its log-ratio is the sum of the agents' log-ratios:

        D = sum over agents i of d_i,    d_i = log pi_i(c_i) / ref_i(c_i) - log pi_i(r_i) / ref_i(r_i)

    and the loss is -log sigmoid(beta * D), or another function of D, see [`pair_losses`].
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
    _card_settings = """
        loss_type loss_weights beta reference_free learning_rate num_train_epochs per_device_train_batch_size
        gradient_accumulation_steps max_length seed
    """.split()

    args: MADPOConfig
    train_dataset: Dataset
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
        self._sums = {"train": {}, "eval": {}}
        self._prepare_team(team, args)
        self.generator = TrainerGenerator(self, sampling_of(args, args.max_completion_length))
        self.sampler = TeamSampler(team, self.generator, args.use_chat_template)
        train_dataset = self._prepare_dataset(train_dataset, None, args, "train")
        reference = None if args.reference_free else self._make_reference()
        # DPOTrainer must not set up a single model. With `precompute_ref_log_probs`, it loads no reference model
        with temporarily_set(args, precompute_ref_log_probs=True, disable_dropout=False, router_aux_loss_coef=None):
            super().__init__(
                args=args,
                model=team,
                data_collator=self._collate,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=team.tokenizers[team.roles[0]],
                callbacks=callbacks,
                optimizers=optimizers,
            )
        saves_best = args.load_best_model_at_end or args.save_strategy == "best"
        has_loss = isinstance(self.eval_dataset, Dataset) and self._is_tokenized(self.eval_dataset.column_names)
        if saves_best and args.metric_for_best_model in (None, "loss", "eval_loss") and not has_loss:
            raise ValueError(
                "`load_best_model_at_end` and `save_strategy: best` need a `metric_for_best_model` of the evaluation: "
                "'reward' for items of the environment, or '<name>_loss' for one of several sets."
            )
        self.precompute_ref_logps = False
        self._fuse_heads("log_probs", "entropy", "mean_logits", "is_top1")
        self._set_up_agents()
        self._set_up_reference(reference)

    # Overrides of the team mixin

    def _run_settings(self) -> dict[str, Any]:
        texts = self.train_dataset.remove_columns([f"{role}/{name}" for role in self.team.roles for name in TOKENS])
        pairs = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return describe_run(self._name, self.team.roles, self.team, texts, self.args) | {"pairs of a step": pairs}

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
        if isinstance(dataset, Dataset) and self._is_tokenized(dataset.column_names):
            return dataset
        is_training = dataset_name == "train" and processing_class is None  # an evaluation set may have this name
        if not is_training and self.environment is not None and not roles_of_columns(dataset.column_names):
            self.sampler.check_items(dataset, self.environment, self.args.num_turns)
            return dataset
        check_preferences(dataset, self.team.roles, name)
        # DPOTrainer takes a column of this name for images
        parts = [dataset.remove_columns([column for column in ("image", "images") if column in dataset.column_names])]
        for role, tokenizer in self.team.tokenizers.items():
            prompt = text_columns(role)[0]
            is_text, where = isinstance(dataset[0][prompt], str), f"`{name}`: {prompt!r} has"
            if not is_text and tokenizer.chat_template is None:
                raise ValueError(f"{where} chat messages, but the tokenizer of {role!r} has no chat template.")
            if is_text and self.environment is not None and uses_chat_template(tokenizer, args.use_chat_template):
                logger.warning(
                    f"{where} texts, but the environment has chat messages, so the training sees other prompts than "
                    "the evaluation. Write messages, or set `use_chat_template=False`."
                )
            reader, kwargs = CompletionReader(tokenizer), self.sampler.template_kwargs(role)
            with temporary_cache_files():
                tokens = parts[0].map(
                    tokenize_pair,
                    fn_kwargs={"role": role, "reader": reader, "kwargs": kwargs},
                    num_proc=args.dataset_num_proc,
                    remove_columns=parts[0].column_names,
                    desc=f"Tokenizing {name}, {role}",
                )
            parts.append(tokens)
        dataset = concatenate_datasets(parts, axis=1)
        check_lengths(dataset, name, self.team, args)
        return dataset

    def _is_tokenized(self, columns: Collection[str]) -> bool:
        return f"{self.team.roles[0]}/{TOKENS[0]}" in columns

    def _collate(self, rows: list[PairRow]) -> PairBatch | list[PairRow]:
        """Makes a batch of tokenized preferences. Items of a task stay a list."""
        if not self._is_tokenized(rows[0]):
            return rows
        limit = self.args.max_length or sys.maxsize
        batch = {"weights": torch.ones(len(rows))}
        for role, tokenizer in self.team.tokenizers.items():
            prompt_column, *answer_columns = (f"{role}/{name}" for name in TOKENS)
            answers = [(row[prompt_column], row[column]) for column in answer_columns for row in rows]
            samples = [Samples(prompt, [ids[: limit - len(prompt)]], [""]) for prompt, ids in answers]
            of_agent = [Row(0, {role: x}, 0, {}) for x in samples]
            batch[role] = tensors = agent_tensors(of_agent, role, tokenizer.pad_token_id, ())
            tensors.inputs = forward_inputs(self.team.agents[role], tensors)
        return batch

    # Reference policy

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        # DPOTrainer calls this when it is created, see `__init__`
        return dataset

    def _reference_logps(self, role: str, rows: AgentTensors) -> Tensor:
        """
        Returns the log-probabilities of an agent's answers under its reference policy, of shape `(2B,)`; zeros without
        a reference.
        """
        if self.args.reference_free:
            return torch.zeros(len(rows), device=rows.prompt_ids.device)
        with self._computing_as_reference() as model:
            outputs = model(team_inputs={role: rows.inputs})
        return outputs[role].log_probs.sum(dim=1)

    # Loss

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._num_parts = len(batches) * self.accelerator.num_processes
        for role in self._router_loss_coefs:
            inputs = (self._forward_inputs(role, batch) for batch in batches)
            self._expert_loads[role] = self._expert_load(role, inputs)
        if self._counts_env_steps:
            self.env_step += self.args.environment_steps_per_pair * round(self._sizes[0].item() * self._num_parts)
        return batches, num_items

    def _count(self, batch: PairBatch) -> Tensor:
        """Counts the pairs of a micro-batch, and the tokens of each agent's chosen answers."""
        weights = batch["weights"]
        tokens = (batch[role].completion_mask.chunk(2)[0].sum(dim=1) for role in self.team.roles)
        return torch.stack([weights.sum(), *((x * weights).sum() for x in tokens)])

    @property
    def _counts_env_steps(self) -> bool:
        return self.args.use_environment_step and CHOSEN_REWARD in self.train_dataset.column_names

    def _forward_inputs(self, role: str, batch: PairBatch) -> dict[str, Any]:
        """Builds the arguments of an agent's forward that returns the log-probabilities of its answers."""
        rows = batch[role]
        if role not in self._router_loss_coefs:
            return rows.inputs
        weighted = replace(rows, router_weights=batch["weights"].repeat(2))
        return forward_inputs(self.team.agents[role], weighted)

    def compute_loss(self, model: torch.nn.Module, inputs: PairBatch, *args: Any, **kwargs: Any) -> Any:
        """
        Computes the loss of a micro-batch, so that the mean over micro-batches and processes is

            mean over the pairs of the optimizer step of l(D)  +  weight of "sft" * sum over agents of L_i,

        with l from [`pair_losses`], and L_i the mean negative log-probability of the tokens of agent i's
        chosen answers. A frozen agent has no L_i, and its answers enter D as a constant, which is 0 unless the
        training is `reference_free`.

        Raises:
            FloatingPointError: The loss is not finite; the texts are written to the output folder.
        """
        references = {role: self._reference_logps(role, inputs[role]) for role in self.team.trained_roles}
        outputs = model(team_inputs={role: self._forward_inputs(role, inputs) for role in self.team.roles})
        for role in self.team.frozen:
            outputs[role].log_probs = outputs[role].log_probs.detach()
            own = outputs[role].log_probs.sum(dim=1)
            references[role] = torch.zeros_like(own) if self.args.reference_free else own
        answers = {role: Answers.of_agent(outputs[role], references[role], inputs[role]) for role in self.team.roles}
        joint = Answers.joint(answers.values())

        weights = inputs["weights"]
        pairs = sft = 0.0
        losses = self.args.loss_type
        for loss_type, weight in zip(losses, self.args.loss_weights or [1.0] * len(losses), strict=True):
            if loss_type == "sft":
                sft += weight
            else:
                pairs = pairs + weight * pair_losses(loss_type, joint, self.args.beta)
        sums = [(pairs * weights).sum()]
        for role, agent_answers in answers.items():
            logps = (agent_answers.logps.chunk(2)[0] * weights).sum()
            sums.append(-sft * logps * (role in self.team.trained_roles))
        loss = self._mean_loss(torch.stack(sums), inputs)  # sums over pairs, and over each agent's chosen tokens
        self._add_metrics(inputs, answers, joint)
        if self.model.training:
            for role, coef in self._router_loss_coefs.items():
                # This loss is a sum over micro-batches and processes, but gradients are means over both
                router_loss = self._expert_loads[role] @ outputs[role].aux_loss[1] * self._num_parts
                mean = self.accelerator.reduce(router_loss.detach(), "mean").item()
                self._metrics["train"][f"agents/{role}/aux_loss"].append(mean)
                loss = loss + coef * router_loss
        with fail_together(self.accelerator):  # before the backward pass: its collectives would wait forever
            if not loss.isfinite():
                end_with_report(self, f"The loss is {loss.item()}", pairs=self._texts(inputs))
        return loss

    def _add_metrics(self, inputs: PairBatch, answers: dict[str, Answers], joint: Answers) -> None:
        """Adds the metrics of this process's micro-batch to the next log entry."""
        weights = inputs["weights"]
        means = joint.metrics(weights, self.args.beta)
        for role in self.team.trained_roles:
            agent_means = answers[role].metrics(weights, self.args.beta)
            del agent_means["logps/chosen_change"]
            means |= {f"agents/{role}/{name}": mean for name, mean in agent_means.items()}
        if self.args.reference_free:
            del means["logps/chosen_change"]
        self._add_means(means)
        tokens = sum(inputs[role].prompt_mask.sum(dim=1) + inputs[role].completion_mask.sum(dim=1) for role in answers)
        self._count_tokens((tokens * weights.repeat(2)).sum())

    def _texts(self, inputs: PairBatch) -> list[dict[str, str]]:
        """Returns the texts of a micro-batch for a failure report."""
        number = len(inputs["weights"])
        columns: dict[str, list[str]] = {}
        for role, tokenizer in self.team.tokenizers.items():
            texts = tokenizer.batch_decode(inputs[role].sequences, skip_special_tokens=True)
            columns |= {f"{role} chosen": texts[:number], f"{role} rejected": texts[number:]}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def predict(self, test_dataset: Dataset, *args: Any, **kwargs: Any) -> PredictionOutput:
        return super().predict(self._prepare_dataset(test_dataset, None, self.args, "eval"), *args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, list):
            add_task_metrics(self, "eval", self._play_evaluation(inputs), self._reported)
            return None, None, None
        return super().prediction_step(model, inputs, *args, **kwargs)

    def _play_episodes(self, items: list[dict], num_episodes: int, stream: str, first: int = 0) -> Trees:
        self._reported: Any = {}  # what reward functions log
        score = partial(
            judge_nodes,
            self.environment,
            evaluation=True,
            chat_roles=self.sampler.chat_roles,
            trainer_state=self.state,
            metrics=self._reported,
        )
        with temporarily_set(self.sampler, stream=stream), scoring(ScoringContext(trainer_state=self.state)):
            return play_episodes(
                items,
                self.environment,
                self.sampler,
                score,
                num_turns=self.args.num_turns,
                num_episodes=num_episodes,
                numbers=range(first, first + len(items)),
            )

    # Metrics

    def log(self, *args: Any, **kwargs: Any) -> None:
        metrics = self._metrics["train"]
        if self.model.training and metrics and self._counts_env_steps:
            metrics["env_step"] = [self.env_step]
        super().log(*args, **kwargs)


# The loss of pairs, as a function of the joint log-ratios. Tests compare it with TRL's `DPOTrainer`


@dataclass
class Answers:
    """
    The answers of an agent, or the joint answers of a team, in a micro-batch of B pairs: first all chosen answers,
    then all rejected ones. The fields are sums over the tokens of an answer, of shape `(2B,)`. For joint answers, they
    are also sums over the agents.
    """

    ref_logps: Tensor  # log-probabilities under the reference policy, in nats
    logps: Tensor  # under the policy
    lengths: Tensor  # numbers of tokens
    entropy: Tensor  # this and the next two fields are for TRL's metrics
    mean_logits: Tensor
    is_top1: Tensor

    @classmethod
    def of_agent(cls, output: FusedCausalLMOutput, ref_logps: Tensor, rows: AgentTensors) -> Answers:
        """Sums an agent's outputs, which are zero outside of the answers."""
        per_token = (output.log_probs, rows.completion_mask, output.entropy, output.mean_logits, output.is_top1)
        return cls(ref_logps, *(x.sum(dim=1) for x in per_token))

    @classmethod
    def joint(cls, answers: Iterable[Answers]) -> Answers:
        """Joins the answers of all agents."""
        return cls(*map(sum, zip(*(vars(agent).values() for agent in answers), strict=True)))

    @property
    def log_ratios(self) -> Tensor:
        return self.logps - self.ref_logps

    def metrics(self, weights: Tensor, beta: float) -> dict[str, Tensor]:
        """
        Computes the metrics of TRL's `DPOTrainer`: the sum of each, and the number of pairs or tokens. `weights`, of
        shape `(B,)`, has 0 for repeated pairs.
        """
        both, pairs = weights.repeat(2), torch.ones_like(weights)

        def sums(values: Tensor, counts: Tensor, weights: Tensor = weights) -> Tensor:
            return torch.stack([(values.detach() * weights).sum(), (counts * weights).sum()])

        logps, rejected_logps = self.logps.chunk(2)
        lengths, rejected_lengths = self.lengths.chunk(2)
        logits, rejected_logits = self.mean_logits.chunk(2)
        chosen, rejected = (beta * self.log_ratios).chunk(2)
        change = self.log_ratios.chunk(2)[0] / lengths.clamp(min=1)
        return {
            "entropy": sums(self.entropy, self.lengths, both),
            "mean_token_accuracy": sums(self.is_top1.chunk(2)[0], lengths),
            "logits/chosen": sums(logits, lengths),
            "logits/rejected": sums(rejected_logits, rejected_lengths),
            "logps/chosen": sums(logps, pairs),
            "logps/rejected": sums(rejected_logps, pairs),
            "logps/chosen_change": sums(change, pairs),
            "rewards/chosen": sums(chosen, pairs),
            "rewards/rejected": sums(rejected, pairs),
            "rewards/margins": sums(chosen - rejected, pairs),
            "rewards/accuracies": sums((chosen > rejected).float(), pairs),
        }


def pair_losses(loss_type: str, answers: Answers, beta: float) -> Tensor:
    """
    Computes a loss of each pair, of shape `(B,)`. With D = c - r, for the joint log-ratios c of the chosen and r of
    the rejected answers:

    | `loss_type` | loss | paper |
    | --- | --- | --- |
    | `sigmoid` | -log sigmoid(beta * D) | [DPO](https://huggingface.co/papers/2305.18290) |
    | `hinge` | max(0, 1 - beta * D) | [SLiC](https://huggingface.co/papers/2309.06657) |
    | `ipo` | (D - 1 / (2 * beta))^2, with c and r per token | [IPO](https://huggingface.co/papers/2310.12036) |
    """
    scores = answers.log_ratios
    if loss_type == "ipo":
        scores = scores / answers.lengths.clamp(min=1)
    delta = torch.sub(*scores.chunk(2))
    if loss_type == "sigmoid":
        return -logsigmoid(beta * delta)
    if loss_type == "hinge":
        return torch.relu(1 - beta * delta)
    return (delta - 1 / (2 * beta)) ** 2


# The tokens of all agents


def tokenize_pair(row: PairRow, role: str, reader: CompletionReader, kwargs: dict[str, Any]) -> PairRow:
    """
    Tokenizes an agent's prompt and answers: as they were sampled, if the row has their token ids and the tokenizer
    reads them as the row's texts, so that a completion that was cut off has no end. Otherwise as TRL does; but
    messages with a reasoning as they would be sampled, with the end of the template, because chat templates leave a
    reasoning out, change or refuse it. `kwargs`: arguments of the chat template.
    """
    tokenizer = reader.tokenizer
    prompt, *answers = (row[name] for name in text_columns(role))
    texts = [text_of(answer, role) for answer in answers]
    ids = [row.get(name) or [] for name in ids_columns(role)]
    has_ids = all(ids) and max(map(max, ids)) < len(tokenizer) and reader.texts(ids) == texts
    if has_ids or (not isinstance(prompt, str) and any(map(reader.has_reasoning, texts))):
        (prompt_ids,) = tokenize_prompts(tokenizer, [prompt], **kwargs)
        if not has_ids:
            messages = [*prompt, {"role": "assistant", "content": CONTENT}]
            end = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs).rpartition(CONTENT)[2].rstrip()
            ids = tokenizer([text + end for text in texts], add_special_tokens=False)["input_ids"]
    else:
        if isinstance(prompt, str):
            answers = [text.removesuffix(tokenizer.eos_token) + tokenizer.eos_token for text in texts]
        prompt_ids = _tokenize(tokenizer, prompt, add_generation_prompt=True, **kwargs)["input_ids"]
        ids = [_tokenize(tokenizer, prompt + answer, **kwargs)["input_ids"] for answer in answers]
        length = min(common_prefix_length(prompt_ids, whole) for whole in ids)
        if length < len(prompt_ids):
            logger.warning_once(
                f"A prompt of {role!r} is not a prefix of the prompt with its answer, because the chat template or "
                f"the tokenizer changes its end, {tokenizer.decode(prompt_ids[length:])!r}. It is left out, so the "
                "training sees another prompt than the agent."
            )
        prompt_ids, ids = prompt_ids[:length], [whole[length:] for whole in ids]
    return dict(zip((f"{role}/{name}" for name in TOKENS), [prompt_ids, *ids], strict=True))


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
                raise ValueError(
                    f"{place}: {text_columns(role)[0]!r} has {prompt} tokens, which leaves no token of the answers "
                    f"within the `max_length` of {limit}."
                )
            num_cut += whole > limit
    if num_cut > 0:
        logger.warning(
            f"{num_cut} pairs of answers in `{name}` are longer than the `max_length` of {limit} tokens: their ends "
            "are not trained."
        )

"""A reward model of the joint answers of a team."""

import copy
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from peft import PeftConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils import ModelOutput, logging
from trl import RewardTrainer

from trl_multiagent.folders import write_json
from trl_multiagent.jobs.fingerprint import describe_dataset
from trl_multiagent.limits import check_dataset, explained
from trl_multiagent.models.adapter_config import check_saved_adapter
from trl_multiagent.models.gguf import converted
from trl_multiagent.models.joint_text import ANSWER_TEMPLATE, CONFIG_KEY, PROMPT_TEMPLATE, JointText
from trl_multiagent.models.packaged import packaged
from trl_multiagent.models.packing import mask_of, pack_ends
from trl_multiagent.models.pretrained import base_of, check_length, hub_id, keep_adapter_in_float32, temporarily_set
from trl_multiagent.preferences.rows import (
    ITEM_ID,
    PairRow,
    answer_columns,
    check_preferences,
    roles_of_columns,
    temporary_cache_files,
    text_columns,
)
from trl_multiagent.report.run_report import RunReport
from trl_multiagent.report.terminal import show_one_bar
from trl_multiagent.trainers.base.checkpoints import DECISIVE_ARGUMENTS, CheckpointCallback, writing
from trl_multiagent.trainers.base.pair_means import PairMeansMixin
from trl_multiagent.trainers.base.team_config import check_trained_weights
from trl_multiagent.trainers.base.team_trainer import CommonTrainerMixin, eval_datasets
from trl_multiagent.trainers.joint_reward_config import JointRewardConfig


logger = logging.get_logger(__name__)

HELD_OUT_FILE = "held_out.json"
ANSWERS = ("chosen_ids", "rejected_ids")  # columns of TRL's tokenization


@explained
class JointRewardTrainer(PairMeansMixin, CommonTrainerMixin, RewardTrainer):
    """
    Trainer of a joint reward model: a sequence classifier that scores the answers of a whole team. It is trained on
    pairs of joint answers, a better and a worse one.

    It is TRL's [`~trl.RewardTrainer`] on the joint texts of the pairs. A joint text has the prompts of all roles, then
    their answers, each below a heading, see [`~trl_multiagent.models.joint_text.JointText`]. Its wording is stored in
    the configuration of the saved model, which is an ordinary model: `AutoModelForSequenceClassification` loads it,
    and [`FunctionEnvironment`] takes its folder as a reward function.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            The model id or folder of a language model or of a sequence classifier, or a sequence classifier with one
            output.
        args ([`JointRewardConfig`], *optional*): Configuration. If `None`, the default configuration is used.
        train_dataset ([`~datasets.Dataset`]): Joint preferences, see [`~trl_multiagent.preferences.rows`].
        eval_dataset ([`~datasets.Dataset`], *optional*):
            Held-out joint preferences. By default, they come from a part of the items, see `eval_fraction`.
        roles (`list[str]`, *optional*): The roles in the order in which the model reads them. By default, they have
            the order of the dataset's columns.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*): Tokenizer. By default, the model's.
        callbacks (`list[TrainerCallback]`, *optional*): Callbacks, as in any `Trainer`.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`): Optimizer and learning rate scheduler.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adapter to train instead of all weights. Checkpoints contain the adapter; the saved model contains it
            merged.

    Raises:
        TypeError: A dataset has the wrong type.
        ValueError: A row is malformed, or the arguments contradict each other.

    Example:

    ```python
    from trl_multiagent import JointRewardConfig, JointRewardTrainer
    from trl_multiagent.preferences import load_preferences

    trainer = JointRewardTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        args=JointRewardConfig(output_dir="judge"),
        train_dataset=load_preferences("outputs/preferences", roles=["poet", "critic"]),
    )
    trainer.train()
    trainer.report()
    trainer.save_model()
    ```
    """

    _tag_names = ["trl", "trl-multiagent", "joint-reward-model"]
    _name = "Joint reward model"

    args: JointRewardConfig
    data_collator: Any

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: JointRewardConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        roles: list[str] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: PeftConfig | None = None,
    ):
        args = args or JointRewardConfig("joint-reward-model")
        if not isinstance(args, JointRewardConfig):
            raise TypeError(f"`args` is a `{type(args).__name__}`: give a `JointRewardConfig`.")
        check_dataset("train_dataset", train_dataset)
        assert train_dataset is not None
        if args.freeze_backbone and peft_config is not None:
            raise ValueError("`freeze_backbone` trains the head alone, so it contradicts `peft_config`: choose one.")
        if isinstance(model, str):
            model = converted(packaged(model))
            check_saved_adapter(model)
        if roles is None:
            roles = roles_of_columns(train_dataset.column_names)
        check_preferences(train_dataset, roles)
        if eval_dataset is None and args.eval_fraction > 0:
            train_dataset, eval_dataset = split_by_item(train_dataset, roles, args.eval_fraction, args.seed)
        templates = (args.prompt_template or PROMPT_TEMPLATE, args.answer_template or ANSWER_TEMPLATE)
        self.joint_text = JointText(tuple(roles), *templates, args.max_length)
        self.num_cut: dict[str, int] = {}  # for each dataset, the number of texts with truncated prompts
        self._sums = {"train": {}, "eval": {}}
        if peft_config is not None:
            peft_config = copy.copy(peft_config)
            peft_config.task_type = "SEQ_CLS"  # the head is trained, too
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
        )
        collate = self.data_collator
        self.data_collator = lambda rows: {**collate(rows), "weights": torch.ones(len(rows)), **self._packed(rows)}
        for dataset in (self.train_dataset, *eval_datasets(self.eval_dataset)):
            lengths = map(len, [*dataset["chosen_ids"], *dataset["rejected_ids"]])
            check_length("A text of the reward model", self.model, max(lengths))
        self.model.config.update({CONFIG_KEY: asdict(self.joint_text)})
        if args.freeze_backbone:
            self.model.base_model.requires_grad_(False)
        if peft_config is not None:
            keep_adapter_in_float32(self.model, self.model.active_adapter)
        check_trained_weights(self.model.named_parameters(), args)
        self.add_callback(CheckpointCallback(self))
        show_one_bar(self)
        agents = {"model": hub_id(self.model.config._name_or_path) or ""}
        facts = {"environment": "", "agents": agents, "dataset": describe_dataset(self.train_dataset)}
        self.add_callback(RunReport(self._name, lambda: facts))

    # Data

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, dataset_name: str) -> Dataset:
        if "chosen_ids" not in dataset.column_names:
            check_preferences(dataset, self.joint_text.roles, dataset_name)
            with temporary_cache_files():
                dataset = dataset.map(
                    lambda row: self._encode_row(row, processing_class),
                    num_proc=args.dataset_num_proc,
                    remove_columns=dataset.column_names,
                    desc=f"Tokenizing {dataset_name} dataset",
                )
            self.num_cut[dataset_name] = sum(dataset["num_cut"])
            if self.num_cut[dataset_name]:
                logger.warning(
                    f"{self.num_cut[dataset_name]} of {2 * len(dataset)} joint texts of `{dataset_name}` are longer "
                    "than `max_length`: they lose the ends of their prompts."
                )
        return dataset

    def _encode_row(self, row: PairRow, tokenizer: PreTrainedTokenizerBase) -> PairRow:
        """Tokenizes the joint texts of a pair, of the answers without their reasoning."""
        prompts, *answers = ({role: row[text_columns(role)[k]] for role in self.joint_text.roles} for k in range(3))
        for k, texts in enumerate(answers):
            texts |= {role: own for role in texts if (own := row.get(answer_columns(role)[k])) is not None}
        (chosen, cut), (rejected, also_cut) = (self.joint_text.encode(tokenizer, prompts, x) for x in answers)
        return {"chosen_ids": chosen, "rejected_ids": rejected, "num_cut": cut + also_cut}

    def _packed(self, rows: list[PairRow]) -> dict[str, dict[str, torch.Tensor]]:
        """Packs the joint texts of a micro-batch, if the model allows it: the texts of a pair share their prompts."""
        model, sequences = base_of(self.model), [list(row[name]) for name in ANSWERS for row in rows]
        # Other heads may read other places than the last token
        if getattr(type(model), "forward", None) is not GenericForSequenceClassification.forward:
            return {}
        for ids in sequences:  # the score is read at the last token that does not count as padding
            while len(ids) > 1 and ids[-1] == model.config.get_text_config().pad_token_id:
                ids.pop()
        packed = pack_ends(model, sequences)
        return {} if packed is None else {"packed": packed}

    # Loss and evaluation

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """
        Computes the loss of a micro-batch, so that the mean over micro-batches and processes is the mean over all
        pairs of

            -log sigmoid(s_c - s_r)  +  center_rewards_coefficient * (s_c + s_r)^2,

        with the scores s_c of the chosen and s_r of the rejected answers.
        """
        weights = inputs["weights"]
        if "packed" in inputs:
            outputs = run_ends(model, base_of(self.model).base_model, **inputs["packed"])
        else:
            outputs = model(inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False)
        chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
        losses = -torch.nn.functional.logsigmoid(chosen - rejected)
        losses = losses + (self.args.center_rewards_coefficient or 0.0) * (chosen + rejected) ** 2
        loss = self._mean_loss((losses * weights).sum().unsqueeze(0), inputs)
        self._count_tokens((inputs["attention_mask"].sum(dim=1) * weights.repeat(2)).sum())
        self._add_metrics(chosen.detach().float(), rejected.detach().float(), weights)
        return (loss, outputs) if return_outputs else loss

    def _add_metrics(self, chosen: torch.Tensor, rejected: torch.Tensor, weights: torch.Tensor) -> None:
        accuracy, mean, margin = (chosen > rejected).float(), (chosen + rejected) / 2, chosen - rejected
        values = {"mean_reward": mean, "accuracy": accuracy, "margin": margin}
        self._add_means({name: torch.stack([(x * weights).sum(), weights.sum()]) for name, x in values.items()})
        metrics = self._metrics["train" if self.model.training else "eval"]
        # The processes may have different numbers of pairs
        scores = gather_object(torch.cat([chosen, rejected])[weights.repeat(2) > 0].tolist())
        metrics["min_reward"] = [min(metrics["min_reward"] + scores)]
        metrics["max_reward"] = [max(metrics["max_reward"] + scores)]

    def report(self) -> dict[str, Any]:
        """
        Evaluates the model on the held-out pairs, and writes the numbers to `held_out.json` in the output folder.

        Returns:
            `dict`: The number of `pairs`, the `accuracy` and the mean `margin` of the scores, and `texts_cut`, the
            number of joint texts of each dataset that lost a part of their prompts.

        Raises:
            ValueError: There are no held-out pairs.
        """
        if self.eval_dataset is None:
            raise ValueError("There are no held-out pairs: set `eval_fraction`, or pass an `eval_dataset`.")
        metrics = self.evaluate()
        facts = {"pairs": len(self.eval_dataset), "texts_cut": self.num_cut}
        facts |= {name: metrics[f"eval_{name}"] for name in ("accuracy", "margin")}
        if self.is_world_process_zero():
            write_json(Path(self.args.output_dir) / HELD_OUT_FILE, facts)
        return facts

    def _run_settings(self) -> dict[str, Any]:
        names = (*DECISIVE_ARGUMENTS, "center_rewards_coefficient", "freeze_backbone", "gradient_accumulation_steps")
        settings = {name: getattr(self.args, name, None) for name in names}
        settings |= {"train_dataset": describe_dataset(self.train_dataset), "joint text": asdict(self.joint_text)}
        return json.loads(json.dumps(settings, default=str))

    # Saving: the model with its adapter merged, so that it can be loaded without PEFT

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._saving or not is_peft_model(self.model) or not is_deepspeed_zero3_enabled():
            return super().save_model(output_dir, _internal_call)
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):  # a merge needs whole weights
            if self.args.should_save:
                self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        with writing("The reward model", folder):
            if self._saving or not self.args.should_save or not is_peft_model(self.model):
                return super()._save(output_dir, state_dict)
            merged = copy.deepcopy(self.model).float().merge_and_unload()  # small updates are lost in 16 bits
            with temporarily_set(self, model=merged):
                super()._save(output_dir)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        place = self.hub_model_id or str(Path(self.args.output_dir).absolute())  # a folder until the repository exists
        with temporarily_set(self, hub_model_id=place):  # the card's snippet loads it
            super().create_model_card(*args, **kwargs)


def run_ends(
    model: torch.nn.Module,
    backbone: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    readers: torch.Tensor,
    ends: torch.Tensor,
) -> ModelOutput:
    """
    Runs a sequence classifier on packed rows. Its head sees only the last token of each sequence.

    Args:
        model (`torch.nn.Module`): The classifier, perhaps wrapped.
        backbone ([`~transformers.PreTrainedModel`]): The part of it below its head.
        input_ids, position_ids, readers (`torch.Tensor`): Packed rows, see [`~models.packing.pack_ends`].
        ends (`torch.Tensor` of shape `(num_sequences,)`): The place of each last token in the flattened rows.
    """

    def read(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = mask_of(readers, position_ids, backbone.dtype)
        return (input_ids,), {**kwargs, "attention_mask": mask, "position_ids": position_ids}

    def choose(module: torch.nn.Module, args: Any, outputs: Any) -> None:
        outputs.last_hidden_state = outputs.last_hidden_state.flatten(0, 1)[ends][:, None]

    with backbone.register_forward_pre_hook(read, with_kwargs=True), backbone.register_forward_hook(choose):
        return model(input_ids=ends[:, None], use_cache=False)  # the head looks for padding in these, and finds none


def split_by_item(dataset: Dataset, roles: list[str], fraction: float, seed: int) -> tuple[Dataset, Dataset | None]:
    """
    Splits preferences into training pairs and held-out pairs by item, so that no item is in both. Without the column
    `item_id`, rows belong to the same item if their prompts are equal. `fraction` is the share of held-out items. At
    least one item is on each side; a single item is not held out.
    """
    columns = [ITEM_ID] if ITEM_ID in dataset.column_names else [text_columns(role)[0] for role in roles]
    keys = [json.dumps(row, default=str) for row in dataset.select_columns(columns)]
    items = list(dict.fromkeys(keys))
    if len(items) < 2:
        return dataset, None
    held_out = set(random.Random(seed).sample(items, min(max(1, round(fraction * len(items))), len(items) - 1)))
    sides = [[k for k, key in enumerate(keys) if (key in held_out) == side] for side in (False, True)]
    training, evaluation = map(dataset.select, sides)
    return training, evaluation

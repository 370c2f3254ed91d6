"""Reward models, loaded and called as TRL's GRPOTrainer does."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.data_utils import apply_chat_template
from trl.trainer.utils import get_config_model_id

from trl_multiagent.environments.task_errors import describe


BATCH_SIZE = 16  # texts in one forward


class RewardModel:
    """
    A sequence classifier with one output, as a reward function of one agent.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): The model, or its id or folder.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): Its tokenizer; by default the one that is saved with
            it.

    Raises:
        ValueError: The model or the tokenizer cannot be loaded.
    """

    def __init__(self, model: str | nn.Module, tokenizer: PreTrainedTokenizerBase | None = None):
        self._placed = not isinstance(model, str)
        if isinstance(model, str) and is_deepspeed_zero3_enabled():
            raise ValueError(
                f"Under ZeRO-3, the reward model {model!r} would be loaded in parts. Load it before the training arguments are "
                "made, and give the model instead of its id."
            )
        try:
            if isinstance(model, str):
                model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
            name = get_config_model_id(model.config)
            self.tokenizer = AutoTokenizer.from_pretrained(name) if tokenizer is None else tokenizer
        except (OSError, ValueError) as error:
            raise ValueError(f"The reward model {show_model(model)} cannot be loaded: {describe(error)}") from error
        self.__name__ = name.rstrip("/").split("/")[-1]
        self.model = model
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # The reward is read at the last token that is not padding
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    @torch.inference_mode()
    def __call__(self, prompts: list, completions: list, **kwargs: Any) -> list[float]:
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        if not self._placed:  # not earlier: a process learns which device is its own when the trainer is made
            self.model.to(torch.accelerator.current_accelerator() or "cpu")
            self._placed = True
        device = next(self.model.parameters()).device
        training = self.model.training
        self.model.eval()
        rewards: list[float] = []
        try:
            for start in range(0, len(texts), BATCH_SIZE):
                inputs = self.tokenizer(
                    text=texts[start : start + BATCH_SIZE],
                    return_tensors="pt",
                    padding=True,
                    padding_side="right",
                    add_special_tokens=False,
                )
                rewards += self.model(**inputs.to(device)).logits[:, 0].float().tolist()
        finally:
            self.model.train(training)
        return rewards

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        return apply_chat_template({"messages": prompt + completion}, self.tokenizer)["text"]


def show_model(model: str | nn.Module) -> str:
    """A model's id, or its class, for a message."""
    return repr(model) if isinstance(model, str) else f"`{type(model).__name__}`"

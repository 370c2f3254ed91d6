"""
Reward models of one agent or of a team, loaded and called as TRL's GRPOTrainer does; and an environment that takes its
reward in training from such a model.
"""

import contextlib
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from statistics import StatisticsError, correlation
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.data_utils import apply_chat_template
from trl.trainer.utils import get_config_model_id

from trl_multiagent.environments.base import (
    Environment,
    History,
    JointAction,
    Outcome,
    Prompts,
    ask,
    check_all_act,
    judge,
    scoring_context,
)
from trl_multiagent.environments.task_errors import describe
from trl_multiagent.environments.wrapper import EnvironmentWrapper
from trl_multiagent.models.adapter_config import check_saved_adapter
from trl_multiagent.models.chat_markers import marker_pattern, without_markers
from trl_multiagent.models.joint_text import CONFIG_KEY, JointText
from trl_multiagent.models.pretrained import check_length


BATCH_SIZE = 16  # texts in one forward
MODEL, TASK, CORRELATION = "rewards/model", "rewards/task", "rewards/correlation"  # metrics


class RewardModel:
    """
    A sequence classifier with one output, as a reward function. A joint reward model, see [`JointRewardTrainer`],
    reads the prompts and the answers of all roles, in the wording of its training. Any other model reads the prompt
    and the answer of one agent.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): The model, or its id or folder.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): Its tokenizer; by default the one that is
            saved with it.

    Raises:
        ValueError: The model or the tokenizer cannot be loaded.
        TooLongError: When it is called, if a text is longer than the learned positions of the model.
    """

    def __init__(self, model: str | nn.Module, tokenizer: PreTrainedTokenizerBase | None = None):
        self._placed = not isinstance(model, str)
        if isinstance(model, str) and is_deepspeed_zero3_enabled():
            raise ValueError(
                f"Under ZeRO-3, the reward model {model!r} would be loaded in parts: load it before the training "
                "arguments are made, and give the model."
            )
        try:
            if isinstance(model, str):
                check_saved_adapter(model)
                model = AutoModelForSequenceClassification.from_pretrained(
                    model, num_labels=1, trust_remote_code=False
                )
            name = get_config_model_id(model.config)
            self.tokenizer = (
                AutoTokenizer.from_pretrained(name, trust_remote_code=False) if tokenizer is None else tokenizer
            )
        except (OSError, ValueError, RecursionError, pickle.UnpicklingError) as error:
            raise ValueError(f"The reward model {show_model(model)} cannot be loaded: {describe(error)}") from error
        self.__name__ = name.rstrip("/").split("/")[-1]
        self.model = model
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        # The reward is read at the last token that is not padding
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        wording = self.model.config.to_dict().get(CONFIG_KEY)
        self.joint_text = None if wording is None else JointText.from_config(wording)  # of a joint reward model
        self.roles = self.joint_text and self.joint_text.roles

    @torch.inference_mode()
    def __call__(self, prompts: list, completions: list, **kwargs: Any) -> list[float]:
        texts = [self._encode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        check_length(f"A text of the reward model {self.__name__!r}", self.model, max(map(len, texts), default=0))
        if not self._placed:  # not earlier, because the trainer sets the device of this process
            self.model.to(torch.accelerator.current_accelerator() or "cpu")
            self._placed = True
        device, training = next(self.model.parameters()).device, self.model.training
        self.model.eval()
        rewards = []
        for start in range(0, len(texts), BATCH_SIZE):
            batch = {"input_ids": texts[start : start + BATCH_SIZE]}
            inputs = self.tokenizer.pad(batch, padding_side="right", return_tensors="pt").to(device)
            rewards += self.model(**inputs).logits[:, 0].float().tolist()
        self.model.train(training)
        return rewards

    @cached_property
    def _markers(self) -> re.Pattern[str]:
        return marker_pattern(self.tokenizer, partial(self.tokenizer.apply_chat_template, tokenize=False))

    def _encode(self, prompt: Any, completion: Any) -> list[int]:
        """Tokenizes a prompt and its completion."""
        if self.joint_text is not None:
            if not isinstance(prompt, Mapping):  # from a trainer with a single model
                (role,) = self.joint_text.roles
                prompt, completion = {role: prompt}, {role: completion}
            return self.joint_text.encode(self.tokenizer, prompt, completion)[0]
        if isinstance(prompt, str):
            text = prompt + completion
        else:
            messages = without_markers(prompt + completion, self._markers)
            text = apply_chat_template({"messages": messages}, self.tokenizer)["text"]
        return self.tokenizer(text=text, add_special_tokens=False)["input_ids"]


class JointRewardModel(RewardModel):
    """
    A joint reward model as a reward function; any other model is an error. [`FunctionEnvironment`] makes one from the
    model or its id. It is also a reward function for TRL's own trainers, if it was trained on the answers of a single
    role. Arguments and errors are the same as in [`RewardModel`].

    Example:

    ```python
    reward = JointRewardModel("outputs/judge")
    reward(prompts=[{"poet": "Write.", "critic": "Judge."}], completions=[{"poet": "rain", "critic": "wet"}])
    ```
    """

    def __init__(self, model: str | nn.Module, tokenizer: PreTrainedTokenizerBase | None = None):
        super().__init__(model, tokenizer)
        if self.joint_text is None:
            raise ValueError(
                f"{show_model(model)} is not a joint reward model: its configuration has no {CONFIG_KEY!r}."
            )


def show_model(model: str | nn.Module) -> str:
    """Returns a model's id, or its class, for a message."""
    return repr(model) if isinstance(model, str) else f"`{type(model).__name__}`"


class ModelRewardEnvironment(EnvironmentWrapper):
    """
    A task with a model's reward in training. Prompts and evaluation stay the task's own.

    The metrics show both rewards, `rewards/model` and `rewards/task`, and their correlation over a batch,
    `rewards/correlation`.

    Args:
        task ([`Environment`]): The task.
        reward (`Callable`): Reward function for the answers of all roles, such as a [`JointRewardModel`].
        score_task (`bool`, *optional*, defaults to `True`): Whether the task's reward is computed in training, too. It
            is only logged. Without it, the outcomes that prompts of later turns read have no `info`.
        version (`str`, *optional*): Name of the reward model in checkpoints. A run with another reward model cannot
            resume them.
    """

    def __init__(
        self, task: Environment, reward: Callable[..., list[float]], score_task: bool = True, version: str = ""
    ):
        super().__init__(task)
        self.reward, self.score_task, self.version = reward, score_task, version

    def __repr__(self) -> str:
        return f"ModelRewardEnvironment({self.task!r}, version={self.version!r})"

    def next_prompts(self, items: list[dict], histories: list[History]) -> list[Prompts]:
        prompts = ask(self.task, items, histories)
        for by_role in filter(None, prompts):
            check_all_act("A joint reward model", by_role, self.roles)
        return prompts

    def judge(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[History], evaluation: bool
    ) -> list[Outcome]:
        prompts = scoring_context().prompts
        if prompts is None or len(prompts) != len(items):  # the environment was called directly
            prompts = self.task.next_prompts(items, histories)
        self.evaluates = evaluation
        scores = self.reward(prompts=prompts, completions=joint_actions)
        if not (evaluation or self.score_task):
            return [Outcome(score, {MODEL: score}) for score in scores]
        outcomes = judge(self.task, items, joint_actions, histories, evaluation)
        if not evaluation:
            known = [k for k, outcome in enumerate(outcomes) if not math.isnan(outcome.reward)]
            with contextlib.suppress(StatisticsError):  # one of the two is constant, or there are too few
                r = correlation([scores[k] for k in known], [outcomes[k].reward for k in known])
                scoring_context().metrics.setdefault(CORRELATION, []).append(r)
        for outcome, score in zip(outcomes, scores, strict=True):
            outcome.metrics |= {MODEL: score} | ({} if math.isnan(outcome.reward) else {TASK: outcome.reward})
            if not evaluation:
                outcome.reward, outcome.role_rewards = score, {}
        return outcomes

    def group_rewards(self, item: dict, histories: list[History]) -> Sequence[float] | None:
        return self.task.group_rewards(item, histories) if self.evaluates else None

    def resume_settings(self) -> dict[str, Any]:
        return {**super().resume_settings(), "reward_model": self.version}

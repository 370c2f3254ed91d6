"""Writing: two agents write two texts about one source."""

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from typing import Any, ClassVar

from trl_multiagent.environments.base import Environment, JointAction, Outcome, Prompt, Turn
from trl_multiagent.environments.writing.data import KINDS
from trl_multiagent.environments.writing.prompts import (
    ROLES,
    UNSEEN,
    WRITER,
    brief_prompt,
    single_prompt,
    split_texts,
    writer_prompt,
)
from trl_multiagent.environments.writing.reward import (
    CONSTANT,
    GROUNDED,
    LARGEST,
    REWARD_VERSION,
    REWARDS,
    pair_metrics,
)


class WritingEnvironment(Environment):
    """
    Two agents write two texts about one source, which should go together: `summary` and `detail` of a post, or `background` and `method` of
    an abstract. A single agent, the `writer`, writes both, with a line between them. Episodes have one turn.

    Items are rows of [`load_writing_dataset`]. The reward is at most 2.98. `grounded` multiplies the structure of the pair by how much of it
    comes from the source. `compat` is CoMLRL's reward, which does not look at the source. The metric `constant_text` is what a fixed pair of
    texts earns for the same item.

    Args:
        kind (`str`, *optional*, defaults to `"tldr"`): `"tldr"` or `"arxiv"`.
        num_agents (`int`, *optional*, defaults to `2`): 2 or 1.
        reward (`str`, *optional*, defaults to `"grounded"`): `"grounded"` or `"compat"`.
        rouge (`bool`, *optional*, defaults to `False`): Whether to measure ROUGE of the first text for items with a reference summary.
        brief (`bool`, *optional*, defaults to `False`): Whether prompts are the source and the role alone, as the demo's model knows them.

    Raises:
        ValueError: an argument has another value, or `rouge` is set and the package rouge-score is not installed.
    """

    watched_metrics: ClassVar[dict[str, str]] = {
        "level_1": "no pair has texts of the right length",
        "source": "no pair says what its source says",
    }

    def __init__(
        self, kind: str = "tldr", num_agents: int = 2, reward: str = GROUNDED, rouge: bool = False, brief: bool = False
    ):
        if kind not in KINDS or reward not in REWARDS:
            raise ValueError(
                f"`kind` must be one of {KINDS}, not {kind!r}, and `reward` of {REWARDS}, not {reward!r}."
            )
        if num_agents not in (1, 2):
            raise ValueError(f"`num_agents`: writing takes 1 or 2 agents, not {num_agents}.")
        self.kind, self.reward, self.brief = kind, reward, brief
        self.roles = ROLES[kind] if num_agents == 2 else (WRITER,)
        self.rouge = make_rouge() if rouge else None
        shares = (
            "source",
            "recall",
            "support",
            "precision",
            "copied",
            "function_words",
            "grounding",
            "rouge1",
            "rougeL",
        )
        self.metric_ranges = {
            **dict.fromkeys(("reward", "total_reward", "compat", "constant_text"), (0.0, LARGEST)),
            **dict.fromkeys(("level_1", "level_3"), (0.0, 0.5)),
            **dict.fromkeys(("level_2", "level_4", *shares), (0.0, 1.0)),
        }

    def __repr__(self) -> str:
        settings = f"kind={self.kind!r}, reward={self.reward!r}, reward_version={REWARD_VERSION}"
        return f"WritingEnvironment(roles={self.roles}, {settings})"

    def resume_settings(self) -> dict[str, Any]:
        prompts = json.dumps(self.prompts({"source": ""}, ()), sort_keys=True)
        return {
            "kind": self.kind,
            "reward": self.reward,
            "reward_version": REWARD_VERSION,
            "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:12],
        }

    def check_turns(self, num_turns: int) -> None:
        if num_turns > 1:
            raise ValueError(f"`num_turns` is {num_turns}, but episodes of writing have one turn.")

    def prompts(self, item: dict, history: Sequence[Turn]) -> dict[str, Prompt]:
        if self.brief:
            return {role: brief_prompt(item["source"], role) for role in self.roles}
        if self.roles == (WRITER,):
            return {WRITER: single_prompt(item["source"], self.kind)}
        return {role: writer_prompt(item["source"], role, self.kind) for role in self.roles}

    def score(
        self, items: list[dict], joint_actions: list[JointAction], histories: list[Sequence[Turn]]
    ) -> list[Outcome]:
        constant: dict[str, float] = {}
        outcomes = []
        for item, action in zip(items, joint_actions, strict=True):
            source = item["source"]
            if source not in constant:
                constant[source] = pair_metrics(*CONSTANT[self.kind], item, self.kind, self.reward)["total_reward"]
            first, second = (action[role] for role in self.roles) if len(action) == 2 else split_texts(action[WRITER])
            metrics = pair_metrics(first, second, item, self.kind, self.reward)
            metrics["constant_text"] = constant[source]
            if self.rouge is not None and item["reference"]:
                scores = self.rouge.score(item["reference"], first)
                metrics |= {name: score.fmeasure for name, score in scores.items()}
            outcomes.append(Outcome(metrics["total_reward"], metrics))
        return outcomes

    def show_answers(self, role: str, prompt: Prompt, answers: JointAction) -> Prompt:
        if isinstance(prompt, str):
            prompt = prompt.replace(UNSEEN, "Your partner's text is above.")
        return super().show_answers(role, prompt, answers)


def make_rouge() -> Any:
    """Makes what computes ROUGE-1 and ROUGE-L with stemming. Raises `ValueError` if its package is not installed."""
    if importlib.util.find_spec("rouge_score") is None:
        raise ValueError("ROUGE needs the package rouge-score: pip install 'trl-multiagent[writing]'.")
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rougeL"], use_stemmer=True)

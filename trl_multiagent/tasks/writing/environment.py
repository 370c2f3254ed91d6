"""Writing: two agents write two texts about one source."""

import hashlib
import importlib.util
from typing import Any, ClassVar

from trl_multiagent.environments.base import Environment, History, JointAction, Outcome, Prompt
from trl_multiagent.environments.task_errors import UnavailableError
from trl_multiagent.tasks.writing.data import KINDS
from trl_multiagent.tasks.writing.prompts import ROLES, SPLIT, UNSEEN, WRITER, first_prompts
from trl_multiagent.tasks.writing.reward import CONSTANT, LARGEST, REWARD_VERSION, REWARDS, pair_metrics


SHARES = "level_2 level_4 source recall support precision copied function_words complete grounding rouge1 rougeL"


class WritingEnvironment(Environment):
    """
    Two agents write two texts about one source, which should go together: `summary` and `detail` of a post, or
    `background` and `method` of an abstract. A single agent, the `writer`, writes both, with a line between them.
    Episodes have one turn.

    Items are rows of [`load_writing_dataset`]. The reward, at most 2.98, is described in [`pair_metrics`]. The metric
    `constant_text` is what a fixed pair of texts earns for the same item.

    Args:
        kind (`str`, *optional*, defaults to `"tldr"`): `"tldr"` or `"arxiv"`.
        num_agents (`int`, *optional*, defaults to `2`): 2 or 1.
        reward (`str`, *optional*, defaults to `"grounded"`): `"grounded"` or `"compat"`.
        rouge (`bool`, *optional*, defaults to `False`): Whether to measure ROUGE of the first text for items with a
            reference summary.
        brief (`bool`, *optional*, defaults to `False`): Whether prompts are the source and the role alone, as the
            demo's model knows them.

    Raises `ValueError` if an argument has another value, and [`UnavailableError`] if `rouge` is set without the
    package rouge-score.
    """

    watched_metrics: ClassVar[dict[str, str]] = {"source": "no pair says what its source says"}
    unseen = UNSEEN, "Your partner's text is above."

    def __init__(
        self,
        kind: str = "tldr",
        num_agents: int = 2,
        reward: str = REWARDS[0],
        rouge: bool = False,
        brief: bool = False,
    ):
        if kind not in KINDS or reward not in REWARDS or num_agents not in (1, 2):
            choices = f"`kind` is one of {KINDS}, `reward` one of {REWARDS}, and `num_agents` 1 or 2"
            raise ValueError(f"{choices}, not {kind!r}, {reward!r} and {num_agents}.")
        self.kind, self.reward, self.brief = kind, reward, brief
        self.roles = ROLES[kind] if num_agents == 2 else (WRITER,)
        self.rouge = make_rouge() if rouge else None
        rewards, levels = ("reward", "total_reward", "compat", "constant_text"), ("level_1", "level_3")
        self.metric_ranges = dict.fromkeys(rewards, (0.0, LARGEST)) | dict.fromkeys(levels, (0.0, 0.5))
        self.metric_ranges |= dict.fromkeys(SHARES.split(), (0.0, 1.0))

    def __repr__(self) -> str:
        settings = f"kind={self.kind!r}, reward={self.reward!r}, reward_version={REWARD_VERSION}"
        return f"WritingEnvironment(roles={self.roles}, {settings})"

    def resume_settings(self) -> dict[str, Any]:
        prompts = hashlib.sha256(str(self.prompts({"source": ""}, ())).encode()).hexdigest()[:12]
        return {"kind": self.kind, "reward": self.reward, "reward_version": REWARD_VERSION, "prompts": prompts}

    def check_turns(self, num_turns: int) -> None:
        if num_turns > 1:
            raise ValueError(f"`num_turns` is {num_turns}, but episodes of writing have one turn.")

    def prompts(self, item: dict, history: History) -> dict[str, Prompt]:
        return {**first_prompts(item["source"], self.kind, self.roles, self.brief)}

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        return [self._judge(item, action) for item, action in zip(items, joint_actions, strict=True)]

    def _judge(self, item: dict, action: JointAction) -> Outcome:
        if WRITER in self.roles:
            first, second = (text.strip() for text in action[WRITER].partition(SPLIT)[::2])
        else:
            first, second = (action[role] for role in self.roles)
        metrics = pair_metrics(first, second, item, self.kind, self.reward)
        metrics["constant_text"] = pair_metrics(*CONSTANT[self.kind], item, self.kind, self.reward)["total_reward"]
        if self.rouge is not None and item["reference"]:
            metrics |= {name: x.fmeasure for name, x in self.rouge.score(item["reference"], first).items()}
        return Outcome(metrics["total_reward"], metrics)


def make_rouge() -> Any:
    """
    Makes what computes ROUGE-1 and ROUGE-L with stemming. Raises [`UnavailableError`] if its package is not installed.
    """
    if importlib.util.find_spec("rouge_score") is None:
        raise UnavailableError("ROUGE needs the package rouge-score: pip install 'trl-multiagent[writing]'.")
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rougeL"], use_stemmer=True)

"""The settings of an evaluation."""

from dataclasses import dataclass
from typing import Any

from trl_multiagent.environments.base import PASSED
from trl_multiagent.limits import check_arguments, setting
from trl_multiagent.rollout.options import HistoryOptions


BASELINES = ("raw_single_agent", "concatenation", "pipeline")
# Settings that decide which answers are sampled. An evaluation can only be resumed with the same values
SAMPLING_FIELDS = """
    num_episodes num_turns max_completion_length temperature top_p top_k min_p repetition_penalty use_chat_template
    memory_mode original_prompt previous_prompts previous_response max_history_length seed stop_strings
""".split()


@dataclass
class EvaluationConfig(HistoryOptions):
    """
    The settings of an evaluation. In a recipe, they are the section `evaluation` and the flags of `trl-multiagent
    evaluate`.

    The settings from `num_turns` to `reward_none` and in [`~rollout.options.HistoryOptions`] default to the values of
    the training, in the algorithm's section.

    Raises:
        ValueError: a value is impossible, or contradicts another one.
    """

    num_episodes: int = setting("Sampled episodes per item, at least the largest k.", 10, ge=1)
    k: list[int] | None = setting("Values of k in pass@k; by default 1, 5 and 10 if `num_episodes` allows.", ge=1)
    num_turns: int | None = setting("Turns of an episode.", ge=1, le=1000)
    max_completion_length: int | None = setting("Maximum number of tokens of a completion.", ge=1)
    temperature: float | None = setting("Temperature, 0 for greedy decoding.", ge=0)
    top_p: float | None = setting("Nucleus sampling probability.", gt=0, le=1)
    top_k: int | None = setting("Number of most likely tokens to sample from, 0 for all.", ge=0)
    min_p: float | None = setting("Minimum probability of a token, relative to the most likely one.", ge=0, le=1)
    repetition_penalty: float | None = setting("Penalty of repeated tokens.", gt=0)
    stop_strings: dict[str, list[Any]] | None = setting("Strings that end a completion, a list per role.")
    use_chat_template: bool | None = setting("Whether prompts are chat messages.")
    chat_template_kwargs: dict[str, Any] | None = setting(
        "Arguments of the chat templates. They take precedence over the training's."
    )
    discount: float | None = setting("Discount of the return.", ge=0, le=1)
    reward_none: str | None = setting(
        "Answers that no reward function scores: 'error', or 'drop', which leaves them out of means and reports their "
        "share as `reward_none`.",
        choices=("error", "drop"),
    )
    items_per_batch: int = setting("Items that are played and written together.", 64, ge=1)
    generation_token_budget: int | None = setting("Maximum number of tokens in a generate call.", 262144, ge=1)
    seed: int = setting("Random seed of the sampling and of the confidence intervals.", 42, ge=0, le=4294967295)
    pass_metric: str = setting("The metric that decides whether an answer passes: it must be at least 1.", PASSED)
    num_bootstraps: int = setting("Random draws for a confidence interval.", 10000, ge=100)
    confidence: float = setting("Level of the confidence intervals.", 0.95, gt=0, lt=1)
    baselines: list[str] | None = setting(
        "Baselines on the same items: raw_single_agent, concatenation, pipeline.", choices=BASELINES
    )
    baseline_model: str | None = setting("Model of the baselines; by default the one that the team started from.")
    control: str | None = setting(
        "Policy that is trained at the cost of each run, and compared with the run's team: 'single_agent' answers "
        "alone, 'centralized' is one agent that answers for all roles.",
        choices=("single_agent", "centralized"),
    )
    control_model: str | None = setting("Model that the control starts from; by default the last agent's.")
    contributions: bool = setting(
        "Whether to replace each agent by nothing, by the untrained agent and, with several teams, by another "
        "team's agent.",
        False,
    )
    ablate: list[str] | None = setting(
        "What to take from each team: 'messages', which are cut, or exchanged between items.", choices=("messages",)
    )
    output_dir: str | None = setting("Folder of the results; by default one in `output.base_dir`.")
    disable_tqdm: bool = setting("Disable the progress bar.", False)

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.chat_template_kwargs is not None:
            from trl_multiagent.models.reasoning import check_template_kwargs  # --help does without transformers

            check_template_kwargs("`chat_template_kwargs`", self.chat_template_kwargs)
        if self.k is None:
            self.k = [k for k in (1, 5, 10) if k <= self.num_episodes]
        if not self.k or len(set(self.k)) < len(self.k):
            raise ValueError(f"`k` is {self.k}; it must be a list of different numbers, such as [1, 5, 10].")
        largest = max(self.k)
        if largest > self.num_episodes:
            raise ValueError(
                f"pass@{largest} needs at least {largest} episodes per item, but `num_episodes` is "
                f"{self.num_episodes}: raise it, or remove {largest} from `k`."
            )
        if self.temperature == 0 and self.num_episodes > 1:
            raise ValueError("`temperature` is 0, so all episodes of an item are the same: set `num_episodes` to 1.")

    @property
    def discount_factor(self) -> float:
        return 1.0 if self.discount is None else self.discount

    @property
    def pass_at(self) -> list[int]:
        """The k of pass@k, in order."""
        return sorted(self.k or [])

"""The settings of a collection of preferences."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from trl_multiagent.endpoints.endpoint import Endpoint, make_endpoint
from trl_multiagent.limits import check_arguments


CANDIDATES_FOLDER = "candidates"  # in the folder of the preferences
# Fields that decide which candidates are sampled and how they are scored. A collection is only continued with the same ones
SAMPLING_FIELDS = (
    "preference_num_candidates",
    "comparator_num_candidates",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "use_chat_template",
    "generation_token_budget",
    "items_per_chunk",
    "reward_scale",
    "reward_shift",
    "seed",
)
# Fields that decide which pairs are made of the candidates
PAIRING_FIELDS = (
    "pair_selection",
    "preference_pairs_per_sample",
    "use_environment_step",
    "environment_steps_per_pair",
    "log_reward_distribution",
)


@dataclass
class PreferenceConfig:
    """
    The settings of [`collect_preferences`]. In a recipe, they are keys of the section of the algorithm, such as `madpo`.

    Raises:
        ValueError: a value is impossible, or contradicts another one.
    """

    # See `Limits`. Settings are checked against it before this module is imported
    limits: ClassVar[dict[str, dict[str, Any]]] = {
        "preference_num_candidates": {"ge": 1, "le": 1000000},
        "preference_pairs_per_sample": {"ge": 1},
        "pair_selection": {"choices": ("reward_gap", "random", "all", "comparator_reward")},
        "environment_steps_per_pair": {"ge": 1, "le": 1000000},
        "comparator_policy": {"choices": ("current", "current_copy", "history", "model", "api")},
        "comparator_generation_mode": {"choices": ("decentralized", "centralized", "sequential")},
        "comparator_num_candidates": {"ge": 1, "le": 1000000},
        "comparator_history_k": {"ge": 1, "le": 1000000},
        "comparator_api_timeout": {"gt": 0, "le": 1000000},
        "comparator_api_deadline": {"gt": 0, "le": 1000000},
        "comparator_api_tries": {"ge": 1, "le": 1000},
        "comparator_api_concurrency": {"ge": 1, "le": 10000},
        "comparator_api_token_budget": {"ge": 1},
        "comparator_api_input_price": {"ge": 0, "le": 1000000000},
        "comparator_api_output_price": {"ge": 0, "le": 1000000000},
        "max_completion_length": {"ge": 1, "le": 1048576},
        "temperature": {"gt": 0, "le": 1000},
        "top_p": {"gt": 0, "le": 1},
        "top_k": {"ge": 0, "le": 1000000000},
        "min_p": {"ge": 0, "le": 1},
        "repetition_penalty": {"gt": 0, "le": 1000},
        "generation_token_budget": {"ge": 1},
        "items_per_chunk": {"ge": 1},
        "reward_scale": {"ne": 0, "ge": -1000000, "le": 1000000},
        "reward_shift": {"ge": -1000000, "le": 1000000},
        "seed": {"ge": 0, "le": 4294967295},
    }

    output_dir: str = field(default="outputs/preferences", metadata={"help": "Folder of the collected preferences."})
    preference_num_candidates: int = field(default=80, metadata={"help": "Joint answers that are sampled per item."})
    preference_pairs_per_sample: int | None = field(
        default=16, metadata={"help": "Pairs that are kept per item; null keeps all."}
    )
    pair_selection: Literal["reward_gap", "random", "all", "comparator_reward"] = field(
        default="reward_gap",
        metadata={
            "help": "Which pairs are kept: those with the largest gap of rewards first, random ones, all, or those whose comparator has the greatest reward first."
        },
    )
    use_environment_step: bool = field(
        default=True, metadata={"help": "Whether pairs count as env steps, as CoMLRL counts them."}
    )
    environment_steps_per_pair: int = field(default=2, metadata={"help": "Env steps per pair in this count."})
    log_reward_distribution: bool = field(
        default=False, metadata={"help": "Whether to draw the rewards and the gaps, in rewards.png."}
    )
    comparator_policy: Literal["current", "current_copy", "history", "model", "api"] | None = field(
        default=None,
        metadata={
            "help": "Policy that samples the other answer of each pair: the team itself, a copy of it that is not trained, the team of an earlier round, other models, or a model at an endpoint. By default, both answers are candidates of the team."
        },
    )
    comparator_generation_mode: Literal["decentralized", "centralized", "sequential"] = field(
        default="decentralized",
        metadata={
            "help": "How `comparator_policy: model` and `api` answer: one agent, or one request, per role; one model for all roles at once, in tagged blocks; or one model, role by role."
        },
    )
    comparator_model_name: str | None = field(
        default=None, metadata={"help": "Model id or folder, or the folder of a saved team, of `model`."}
    )
    comparator_agents: list[str] | None = field(default=None, metadata={"help": "Model ids of `model`, one per role."})
    comparator_api_model: str | None = field(
        default=None,
        metadata={"help": "With `api`, the model's name, at the provider that it names or at `comparator_api_url`."},
    )
    comparator_api_url: str | None = field(
        default=None, metadata={"help": "Base URL of the endpoint, such as http://localhost:8000/v1."}
    )
    comparator_api_format: Literal["openai", "anthropic", "generic"] | None = field(
        default=None,
        metadata={
            "help": "'openai' for any OpenAI-compatible endpoint, or 'anthropic'; by default decided by the model's name. 'generic', of CoMLRL, is not supported."
        },
    )
    comparator_api_key_env: str | None = field(
        default=None,
        metadata={
            "help": "Environment variable that holds the key; by default the provider's. With `comparator_api_url` and without this, no key is sent."
        },
    )
    comparator_api_timeout: float = field(default=120.0, metadata={"help": "Seconds that one request may take."})
    comparator_api_deadline: float = field(
        default=1800.0, metadata={"help": "Seconds that all requests for a chunk of items may take together."}
    )
    comparator_api_tries: int = field(
        default=3, metadata={"help": "Number of attempts per request if the endpoint fails."}
    )
    comparator_api_concurrency: int = field(
        default=16, metadata={"help": "Requests at the same time, in each process."}
    )
    comparator_api_token_budget: int | None = field(
        default=None, metadata={"help": "Tokens of all requests and answers of a collection at most."}
    )
    comparator_api_input_price: float | None = field(
        default=None, metadata={"help": "Price of a million prompt tokens, to report the cost."}
    )
    comparator_api_output_price: float | None = field(
        default=None, metadata={"help": "Price of a million answer tokens."}
    )
    comparator_api_extra_body: dict[str, Any] | None = field(
        default=None, metadata={"help": "More fields of each request."}
    )
    comparator_num_candidates: int | None = field(
        default=None, metadata={"help": "Joint answers of the comparator per item; by default as many as the team's."}
    )
    comparator_history_k: int = field(
        default=1, metadata={"help": "How many rounds ago the team of `history` was saved."}
    )
    policy_checkpoint_dir: str | None = field(
        default=None, metadata={"help": "Folder of the teams of earlier rounds, round_0, round_1, ..."}
    )
    max_completion_length: int = field(default=256, metadata={"help": "Tokens of a completion at most."})
    temperature: float = field(default=1.0, metadata={"help": "Temperature of the sampling."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus of the sampling."})
    top_k: int | None = field(
        default=None, metadata={"help": "Most likely tokens that are sampled from; null or 0 for all."}
    )
    min_p: float | None = field(
        default=None, metadata={"help": "Least probability of a token, relative to the most likely one."}
    )
    repetition_penalty: float = field(default=1.0, metadata={"help": "Penalty of repeated tokens."})
    use_chat_template: bool | None = field(
        default=None,
        metadata={
            "help": "Chat messages for all (true) or no (false) agents; by default for those with a chat template."
        },
    )
    generation_token_budget: int | None = field(
        default=262144, metadata={"help": "Upper bound of prompt and completion tokens in one generate call."}
    )
    items_per_chunk: int = field(default=16, metadata={"help": "Items that are sampled, scored and written together."})
    reward_scale: float = field(default=1.0, metadata={"help": "Factor applied to every reward."})
    reward_shift: float = field(default=0.0, metadata={"help": "Added to every reward, after the scale."})
    seed: int = field(default=42, metadata={"help": "Random seed."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Whether there is no progress bar."})

    def __post_init__(self) -> None:
        check_arguments(self)
        self.top_k = self.top_k or 0  # null and 0 mean the same
        if self.preference_num_candidates == 1 and self.comparator_policy is None:
            raise ValueError("`preference_num_candidates` is 1, it must be at least 2: a pair has two answers.")
        if self.pair_selection == "all" and self.preference_pairs_per_sample is not None:
            raise ValueError("`pair_selection: all` keeps every pair: set `preference_pairs_per_sample` to null.")
        if self.pair_selection == "comparator_reward" and self.comparator_policy is None:
            raise ValueError("`pair_selection: comparator_reward` needs a comparator: set `comparator_policy`.")
        self._check_comparator()

    def _check_comparator(self) -> None:
        policy, mode = self.comparator_policy, self.comparator_generation_mode
        if policy == "history" and self.policy_checkpoint_dir is None:
            raise ValueError(
                "`comparator_policy: history` needs `policy_checkpoint_dir`, the folder of the earlier teams."
            )
        if policy == "model" and (self.comparator_model_name is None) == (self.comparator_agents is None):
            raise ValueError("`comparator_policy: model` needs either `comparator_model_name` or `comparator_agents`.")
        if policy == "api":
            self.comparator_endpoint(1)
        elif mode != "decentralized" and (policy != "model" or self.comparator_model_name is None):
            raise ValueError(
                f"`comparator_generation_mode: {mode}` has one model answer for all roles: set `comparator_policy: model` and "
                "`comparator_model_name`, or `comparator_policy: api`."
            )

    def comparator_endpoint(self, num_roles: int) -> Endpoint:
        """
        The endpoint of `comparator_policy: api`.

        Args:
            num_roles (`int`): Number of roles.

        Raises:
            ValueError: a setting is missing or impossible.
        """
        if self.comparator_api_model is None:
            raise ValueError("`comparator_policy: api` needs `comparator_api_model`, the name of the model.")
        if self.comparator_api_format == "generic":
            raise ValueError(
                "`comparator_api_format` is 'generic', which `comparator_policy: api` does not support: set it to openai or anthropic."
            )
        prefix = "comparator_api_"
        answers = num_roles if self.comparator_generation_mode == "centralized" else 1  # in one text
        return make_endpoint(
            self.comparator_api_model,
            self.comparator_api_url,
            self.comparator_api_key_env,
            self.comparator_api_format,
            names=(f"{prefix}url", f"{prefix}key_env", f"{prefix}format"),
            max_tokens=answers * self.max_completion_length,
            # 1 is the default everywhere, and some models reject the parameter
            temperature=None if self.temperature == 1.0 else self.temperature,
            top_p=None if self.top_p == 1.0 else self.top_p,
            extra_body=self.comparator_api_extra_body,
            timeout=self.comparator_api_timeout,
            deadline=self.comparator_api_deadline,
            tries=self.comparator_api_tries,
            concurrency=self.comparator_api_concurrency,
            token_budget=self.comparator_api_token_budget,
            input_price=self.comparator_api_input_price,
            output_price=self.comparator_api_output_price,
        )

    @property
    def sampling_kwargs(self) -> dict[str, Any]:
        """The fields of [`~transformers.GenerationConfig`]."""
        kwargs: dict[str, Any] = {
            "max_new_tokens": self.max_completion_length,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        kwargs |= {"top_k": self.top_k, "repetition_penalty": self.repetition_penalty, "disable_compile": True}
        return kwargs if self.min_p is None else {**kwargs, "min_p": self.min_p}

    @property
    def candidates_per_item(self) -> int:
        """Number of joint answers that are sampled and scored per item, those of the comparator included."""
        return self.preference_num_candidates + self.num_comparator_candidates

    @property
    def num_comparator_candidates(self) -> int:
        if self.comparator_policy is None:
            return 0
        number = self.comparator_num_candidates
        return self.preference_num_candidates if number is None else number

    def process_reward(self, reward: float) -> float:
        return reward * self.reward_scale + self.reward_shift

    def environment_steps(self, num_pairs: int) -> int:
        """Env steps as CoMLRL counts them: a fixed number per pair, or none. Sampling costs nothing in this count."""
        return num_pairs * self.environment_steps_per_pair if self.use_environment_step else 0

    def values(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Some of the settings, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name in names}

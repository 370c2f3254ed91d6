"""The settings of a collection of preferences."""

from dataclasses import dataclass
from typing import Any, Literal

from trl_multiagent.endpoints import FIELDS, EndpointSettings, endpoint_section, make_endpoint
from trl_multiagent.limits import check_arguments, setting
from trl_multiagent.rollout.options import SamplingOptions


CANDIDATES_FOLDER = "candidates"  # in the folder of the preferences
# Fields that decide which candidates are sampled and how they are scored. A collection can only be resumed with the
# same values
SAMPLING_FIELDS = """
    preference_num_candidates comparator_num_candidates max_completion_length temperature top_p top_k min_p
    repetition_penalty use_chat_template generation_token_budget items_per_chunk reward_scale reward_shift seed
""".split()
# Fields that decide which pairs are made of the candidates
PAIRING_FIELDS = "pair_selection preference_pairs_per_sample use_environment_step environment_steps_per_pair".split()
# The settings for the fields of `EndpointSettings`. The team's settings of the sampling also apply to the endpoint
API_KEYS = {x: f"comparator_api_{x}" for x in FIELDS if x not in ("max_tokens", "temperature", "top_p")}
API_KEYS |= {"base_url": "comparator_api_url", "api": "comparator_api_format"}


@dataclass
class PreferenceConfig(endpoint_section(API_KEYS, own=("model", "api")), SamplingOptions):  # type: ignore[misc]
    """
    The settings of [`collect_preferences`]. In a recipe, they are keys of the section of the algorithm, such as
    `madpo`. Raises `ValueError` if a value is impossible, or contradicts another one.
    """

    output_dir: str = setting("Folder of the collected preferences.", "outputs/preferences")
    preference_num_candidates: int = setting("Joint answers that are sampled per item.", 80, ge=1)
    preference_pairs_per_sample: int | None = setting("Pairs that are kept per item; null keeps all.", 16, ge=1)
    pair_selection: Literal["reward_gap", "random", "all", "comparator_reward"] = setting(
        "Which pairs are kept: the largest gap of rewards first, random ones, all, or the greatest reward of the "
        "comparator first.",
        "reward_gap",
    )
    use_environment_step: bool = setting("Whether pairs count as env steps, as CoMLRL counts them.", True)
    environment_steps_per_pair: int = setting("Env steps per pair in this count.", 2, ge=1)
    comparator_policy: Literal["current", "current_copy", "history", "model", "api"] | None = setting(
        "Policy that samples the other answer of each pair: the team itself (two names), the team of an earlier "
        "round, other models, or a model at an endpoint. By default, both answers are candidates of the team."
    )
    comparator_generation_mode: Literal["decentralized", "centralized"] = setting(
        "How `comparator_policy: model` and `api` answer: one agent, or one request, per role; or one model for all "
        "roles at once, in tagged blocks.",
        "decentralized",
    )
    comparator_model_name: str | None = setting("Model id or folder, or the folder of a saved team, of `model`.")
    comparator_agents: list[str] | None = setting("Model ids of `model`, one per role.")
    comparator_api_model: str | None = setting("With `api`, the model's name at its provider or `comparator_api_url`.")
    comparator_api_format: Literal["openai", "anthropic", "generic"] | None = setting(
        "'openai' or 'anthropic', both with an OpenAI-compatible endpoint; by default decided by the model's name. "
        "'generic', of CoMLRL, is not supported."
    )
    comparator_num_candidates: int | None = setting(
        "Joint answers of the comparator per item; by default, and at most, as many as the team's.", ge=1
    )
    comparator_history_k: int = setting("How many rounds ago the team of `history` was saved.", 1, ge=1)
    policy_checkpoint_dir: str | None = setting("Folder of the teams of earlier rounds, round_0, round_1, ...")
    min_p: float | None = setting("Minimum probability of a token, relative to the most likely one.", ge=0, le=1)
    repetition_penalty: float = setting("Penalty of repeated tokens.", 1.0, gt=0)
    generation_token_budget: int | None = setting("Maximum number of tokens in a generate call.", 262144, ge=1)
    items_per_chunk: int = setting("Items that are sampled, scored and written together.", 16, ge=1)
    reward_scale: float = setting("Factor applied to every reward.", 1.0, ne=0)
    reward_shift: float = setting("Added to every reward, after the scale.", 0.0)
    seed: int = setting("Random seed.", 42, ge=0, le=4294967295)
    disable_tqdm: bool = setting("Disable the progress bar.", False)

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.preference_num_candidates == 1 and self.comparator_policy is None:
            raise ValueError("`preference_num_candidates` is 1; it must be at least 2: a pair has two answers.")
        if self.pair_selection == "all" and self.preference_pairs_per_sample is not None:
            raise ValueError("`pair_selection: all` keeps every pair: set `preference_pairs_per_sample` to null.")
        if self.pair_selection == "comparator_reward" and self.comparator_policy is None:
            raise ValueError("`pair_selection: comparator_reward` needs a comparator: set `comparator_policy`.")
        policy, mode = self.comparator_policy, self.comparator_generation_mode
        if policy == "history" and self.policy_checkpoint_dir is None:
            raise ValueError("`comparator_policy: history` needs `policy_checkpoint_dir`, where earlier teams are.")
        if policy == "model" and (self.comparator_model_name is None) == (self.comparator_agents is None):
            raise ValueError("`comparator_policy: model` needs either `comparator_model_name` or `comparator_agents`.")
        if policy == "api":
            self.comparator_endpoint(1)
        elif mode != "decentralized" and (policy != "model" or self.comparator_model_name is None):
            raise ValueError(
                f"`comparator_generation_mode: {mode}` has one model answer for all roles: set `comparator_policy: "
                "model` and `comparator_model_name`, or `comparator_policy: api`."
            )

    def comparator_endpoint(self, num_roles: int) -> EndpointSettings:
        """
        Makes the endpoint of `comparator_policy: api`. Raises `ValueError` if a setting is missing or impossible.
        """
        if self.comparator_api_model is None:
            raise ValueError("`comparator_policy: api` needs `comparator_api_model`, the name of the model.")
        if self.comparator_api_format == "generic":
            raise ValueError("`comparator_api_format: generic` is not supported: set it to openai or anthropic.")
        answers = num_roles if self.comparator_generation_mode == "centralized" else 1  # in one text
        return make_endpoint(
            **{field: getattr(self, key) for field, key in API_KEYS.items()},
            called=API_KEYS.__getitem__,
            max_tokens=answers * self.max_completion_length,
            # 1 is the default everywhere, and some models reject the parameter
            temperature=None if self.temperature == 1.0 else self.temperature,
            top_p=None if self.top_p == 1.0 else self.top_p,
        )

    @property
    def num_comparator_candidates(self) -> int:
        own = 0 if self.comparator_policy is None else self.preference_num_candidates
        return min(self.comparator_num_candidates or own, own)  # the c-th answers of both make a pair

    def process_reward(self, reward: float) -> float:
        return reward * self.reward_scale + self.reward_shift

    def values(self, names: list[str]) -> dict[str, Any]:
        """Returns some of the settings, by name."""
        return {name: getattr(self, name) for name in names}

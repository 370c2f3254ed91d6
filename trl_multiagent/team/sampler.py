"""Samples completions with a team without a trainer."""

import copy
import difflib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from trl_multiagent.environments.base import Environment
from trl_multiagent.models.generation import generate_groups
from trl_multiagent.models.positions import check_prompts, learned_positions
from trl_multiagent.rollout.history import WholePrompt, tokenize_nodes, uses_chat_template
from trl_multiagent.rollout.history_options import FULL_HISTORY, HistoryOptions
from trl_multiagent.rollout.tree import Node, Samples, root_nodes


class SamplingTeam(Protocol):
    """The part of an [`AgentTeam`] that sampling needs."""

    roles: tuple[str, ...]
    tokenizers: dict[str, PreTrainedTokenizerBase]

    def activate(self, role: str) -> AbstractContextManager[PreTrainedModel]: ...

    def evaluating(self) -> AbstractContextManager[None]: ...

    def end_tokens(self, role: str) -> list[int]: ...


# Arguments of `GenerationConfig` that would change what `generate` returns or needs, and what to use instead
REFUSED = {
    "num_return_sequences": "pass an item several times for several episodes",
    "return_dict_in_generate": "episodes contain texts only",
    "stop_strings": "completions end at the agents' own end-of-sequence tokens",
}
RANGES = {"temperature": (0, 1e6), "top_p": (0, 1), "top_k": (0, 1e9)}
# Without a value, `generate` would use that of the model's own generation configuration
DEFAULTS = {"max_new_tokens": 256, "repetition_penalty": 1.0}
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
CHECKED_AT_ONCE = 256  # items
OTHER_NAMES = {"max_completion_length": "max_new_tokens", "max_tokens": "max_new_tokens", "n": "num_return_sequences"}


def sampling_arguments(generation_kwargs: dict[str, Any]) -> dict[str, Any]:
    """
    Checks arguments for sampling, and completes them by the defaults: at most 256 tokens at temperature 1.

    Args:
        generation_kwargs (`dict[str, Any]`): Fields of [`~transformers.GenerationConfig`]. `temperature=0` means greedy
            decoding.

    Returns:
        `dict[str, Any]`: Fields of [`~transformers.GenerationConfig`].

    Raises:
        TypeError: An argument is unknown.
        ValueError: An argument has an impossible value, or cannot be used here.
    """
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    for name, value in generation_kwargs.items():
        if name in REFUSED:
            raise ValueError(f"`{name}` cannot be set here: {REFUSED[name]}.")
        if name not in known:
            similar = [OTHER_NAMES[name]] if name in OTHER_NAMES else difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean `{similar[0]}`?" if similar else "use a field of `transformers.GenerationConfig`."
            raise TypeError(f"Unknown argument `{name}={value!r}`: {advice}")
    for name, (minimum, maximum) in RANGES.items():
        value = generation_kwargs.get(name)
        if value is not None and not (isinstance(value, int | float) and minimum <= value <= maximum):
            raise ValueError(f"`{name}` is {value!r}, it must be a number from {minimum} to {maximum}.")
    greedy = generation_kwargs.get("temperature") == 0
    if greedy and generation_kwargs.get("do_sample"):
        raise ValueError("`temperature=0` is greedy decoding, which `do_sample=True` contradicts: leave one out.")
    if greedy:
        given = {name: value for name, value in generation_kwargs.items() if name not in SAMPLING}
        arguments = {**DEFAULTS, **given, "do_sample": False}
    elif generation_kwargs.get("do_sample", True):
        arguments = {**DEFAULTS, **SAMPLING_DEFAULTS, "do_sample": True, **generation_kwargs}
    else:
        arguments = {**DEFAULTS, **generation_kwargs}
    GenerationConfig(**arguments)  # refuses impossible values
    return arguments


class TeamSampler:
    """
    Samples the completions of all agents at the nodes of a turn. It can be passed to
    [`~rollout.episodes.play_episodes`].

    Args:
        team ([`AgentTeam`]):
            The team.
        use_chat_template (`bool`, *optional*):
            Whether prompts are rendered as chat messages. By default, they are for each agent whose tokenizer has a
            chat template.
        generation_token_budget (`int`, *optional*):
            Upper bound of prompt and completion tokens in one `generate` call, see [`RolloutConfig`].
        history_options ([`~rollout.history.HistoryOptions`], *optional*):
            What the agents see of their past turns. By default, each sees all of its own prompts and responses.
        **generation_kwargs:
            Fields of [`~transformers.GenerationConfig`], see [`sampling_arguments`].
    """

    def __init__(
        self,
        team: SamplingTeam,
        use_chat_template: bool | None = None,
        generation_token_budget: int | None = None,
        history_options: HistoryOptions = FULL_HISTORY,
        **generation_kwargs: Any,
    ):
        self.team = team
        self.use_chat_template = use_chat_template
        self.generation_token_budget = generation_token_budget
        self.history_options = history_options
        self.generation_kwargs = sampling_arguments(generation_kwargs)

    @property
    def chat_roles(self) -> frozenset[str]:
        """The roles whose prompts are chat messages."""
        tokenizers = self.team.tokenizers.items()
        return frozenset(role for role, x in tokenizers if uses_chat_template(x, self.use_chat_template))

    def __call__(self, nodes: list[Node], num_generations: int) -> dict[str, list[Samples]]:
        return {role: self._sample_agent(role, nodes, num_generations) for role in self.team.roles}

    def _sample_agent(self, role: str, nodes: list[Node], num_generations: int) -> list[Samples]:
        tokenizer = self.team.tokenizers[role]
        prompts = self._whole_prompts(role, nodes)
        special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": self.team.end_tokens(role)}
        config = GenerationConfig(**{**special, **self.generation_kwargs})
        with self.team.evaluating(), self.team.activate(role) as agent:
            self._check_lengths(role, agent, prompts)
            ids = [prompt.ids for prompt in prompts]
            groups = self._sample_groups(role, nodes, agent, ids, num_generations, config)
        return [
            Samples(
                prompt.ids,
                group,
                tokenizer.batch_decode(group, skip_special_tokens=True),
                prompt=prompt.prompt,
                dropped_turns=prompt.dropped_turns,
            )
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def _whole_prompts(self, role: str, nodes: list[Node]) -> list[WholePrompt]:
        """Makes one agent's prompt at each node."""
        tokenizer = self.team.tokenizers[role]
        return tokenize_nodes(
            role,
            nodes,
            tokenizer,
            end_tokens=self.team.end_tokens(role),
            as_chat=role in self.chat_roles,
            options=self.history_options,
            tokenize=lambda prompts: [tokenize_prompt(tokenizer, prompt) for prompt in prompts],
            render=partial(render_chat, tokenizer),
        )

    def _check_lengths(self, role: str, agent: PreTrainedModel, prompts: list[WholePrompt]) -> None:
        """Refuses prompts that are too long for the agent's model."""
        lengths = [len(prompt.ids) for prompt in prompts]
        check_prompts(role, agent, [x.prompt for x in prompts], lengths, self.generation_kwargs["max_new_tokens"])

    def check_items(self, items: Sequence[dict], environment: Environment) -> None:
        """
        Checks that the first prompts of some items are not too long for the models of the agents. Only models with learned positions
        have such a limit; without any, nothing is done.

        Args:
            items (`Sequence[dict]`): Dataset rows.
            environment ([`~trl_multiagent.environments.Environment`]): Makes the prompts. It keeps its state.

        Raises:
            TooLongError: a prompt and its completion may have more tokens than the model has positions.
        """
        agents = {}
        for role in self.team.roles:
            with self.team.activate(role) as agent:
                agents[role] = agent
        check_first_prompts(
            items,
            environment,
            agents,
            lambda role, nodes: self._check_lengths(role, agents[role], self._whole_prompts(role, nodes)),
        )

    def _sample_groups(
        self,
        role: str,
        nodes: list[Node],
        agent: PreTrainedModel,
        prompt_ids: list[list[int]],
        num_generations: int,
        config: GenerationConfig,
    ) -> list[list[list[int]]]:
        """Samples an agent's completions at the nodes; see [`~models.generation.generate_groups`]."""
        return generate_groups(agent, prompt_ids, num_generations, config, self.generation_token_budget)


def check_first_prompts(
    items: Sequence[dict],
    environment: Environment,
    agents: Mapping[str, PreTrainedModel],
    check: Callable[[str, list[Node]], None],
) -> None:
    """
    Checks the first prompts of some items for the agents whose models have learned positions. Without any, nothing is done.

    Args:
        items (`Sequence[dict]`): Dataset rows.
        environment ([`~trl_multiagent.environments.Environment`]): Makes the prompts. It keeps its state.
        agents (`Mapping[str, PreTrainedModel]`): The model of each role.
        check (`Callable`): Called with a role and nodes of the first turn, some at a time.
    """
    limited = [role for role, agent in agents.items() if learned_positions(agent) is not None]
    if not limited:
        return
    state = copy.deepcopy(environment.state_dict())
    for start in range(0, len(items), CHECKED_AT_ONCE):
        chunk = [items[k] for k in range(start, min(start + CHECKED_AT_ONCE, len(items)))]
        nodes = root_nodes(chunk, environment)
        for role in limited:
            check(role, nodes)
    if state:
        environment.load_state_dict(state)


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """The text that [`tokenize_prompt`] tokenizes."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def tokenize_prompt(tokenizer: PreTrainedTokenizerBase, prompt: list[dict[str, str]] | str) -> list[int]:
    """The token ids of a text, or of chat messages."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]

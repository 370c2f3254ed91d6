"""
Samples the completions of a team. Training, evaluation, the collection of preferences and `AgentTeam.collaborate` use
the same sampler.

[`TeamSampler`] makes the prompts of all agents at the nodes of a turn, and checks their lengths. A [`Generator`] then
samples the completions of all agents in one call.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMode
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging
from transformers.utils.chat_template_utils import render_jinja_template
from trl.data_utils import prepare_multimodal_messages

from trl_multiagent.environments.base import AgentCall, Environment, Prompt, call_of
from trl_multiagent.environments.task_errors import UnavailableError
from trl_multiagent.models.chat_markers import CONTENT
from trl_multiagent.models.generation import Agents, Completion, generate_groups
from trl_multiagent.models.grouped_lora import Stacked
from trl_multiagent.models.pretrained import check_length
from trl_multiagent.models.reasoning import (
    MALFORMED,
    CompletionReader,
    Reasoning,
    check_template_kwargs,
    template_kwargs,
)
from trl_multiagent.rollout.history import WholePrompt, tokenize_nodes, uses_chat_template
from trl_multiagent.rollout.options import FULL_HISTORY, HistoryOptions
from trl_multiagent.rollout.tree import Node, Samples, acting, derive_seed, first_nodes


logger = logging.get_logger(__name__)

END_SETTINGS = {"min_new_tokens", "min_length", "exponential_decay_length_penalty", "forced_eos_token_id"}
MOST_PADDING = 1.25  # several agents share a call if padding makes it at most this many times as large


class SamplingTeam(Protocol):
    """The part of an [`AgentTeam`] that sampling needs."""

    roles: tuple[str, ...]
    agents: dict[str, PreTrainedModel]  # without their adapters
    tokenizers: dict[str, PreTrainedTokenizerBase]
    reasoning: dict[str, Reasoning]
    chat_template_kwargs: dict[str, dict[str, Any]]

    @property
    def joinable(self) -> Mapping[str, str]:
        """The agents that can compute together with others, each with the name of its model."""
        ...

    def together(self, roles: Sequence[str]) -> AbstractContextManager[tuple[PreTrainedModel, Stacked | None]]: ...

    def evaluating(self) -> AbstractContextManager[None]: ...

    def end_tokens(self, role: str) -> list[int]: ...


@dataclass
class TurnPrompts:
    """Input of one call of a generator."""

    nodes: dict[str, list[Node]]  # for each agent, the nodes of a turn at which it acts, possibly none
    prompt_ids: dict[str, list[list[int]]]  # for each agent, the token ids of its prompts at these nodes
    num_generations: int  # completions of each prompt
    stream: str = ""  # distinguishes several samples at the same nodes


@dataclass
class Completions:
    """The completions of one prompt."""

    ids: list[list[int]]  # token ids of each completion, up to and including its end-of-sequence token
    logps: list[list[float]] | None = None  # log-probabilities with which these tokens were sampled, in nats


class Generator(Protocol):
    """Samples the completions of all agents of a turn."""

    max_new_tokens: int  # of a completion
    stop_strings: Mapping[str, Sequence[str]]  # strings that end a completion, by role

    def generate(self, turn: TurnPrompts) -> dict[str, list[Completions]]:
        """Returns the completions of each agent in `turn.prompt_ids`, one entry per prompt."""
        ...


class TransformersGenerator:
    """
    Samples with transformers. Agents on one base, or with shared weights, sample in one call, unless that would need
    much padding.

    `arguments`: all fields of [`~transformers.GenerationConfig`] that sampling needs, see [`sampling_arguments`].
    `token_budget`: upper bound of prompt and completion tokens in one `generate` call. `stop_strings`: see
    [`Generator`]. With a `seed`, the draws of a completion depend only on the seed, the stream, the item's number, the
    episode or the path of joint actions, the turn, the role and the completion's number. Without a seed, torch's
    global generator draws one for each turn.
    """

    def __init__(
        self,
        team: SamplingTeam,
        arguments: dict[str, Any],
        token_budget: int | None = None,
        stop_strings: Mapping[str, Sequence[str]] | None = None,
        seed: int | str | None = None,
    ):
        self.team = team
        self.seed = seed
        self.arguments = arguments
        self.token_budget = token_budget
        self.stop_strings = stop_strings or {}
        self.max_new_tokens: int = arguments["max_new_tokens"]

    def generate(self, turn: TurnPrompts) -> dict[str, list[Completions]]:
        completions: dict[str, list[list[Completion]]] = {}
        for roles in self.calls(turn):
            with self.computing(roles) as (model, group):
                completions |= self.sample(model, group, roles, turn)
        return {
            role: [Completions([[*x] for x in ids], [x.logps for x in ids]) for ids in completions[role]]
            for role in turn.prompt_ids
        }

    def calls(self, turn: TurnPrompts) -> list[list[str]]:
        """Returns the agents of each call."""
        joinable, groups = self.team.joinable, dict[Any, list[str]]()
        mode = GenerationConfig(**self.arguments).get_generation_mode()
        for role in turn.prompt_ids:
            joins = role in joinable and mode in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)
            # Some settings change the probability of end tokens, so agents in one call must have the same ones
            ends = self.team.end_tokens(role) if END_SETTINGS & self.arguments.keys() else ()
            groups.setdefault((joinable[role], *ends) if joins else role, []).append(role)
        return [part for roles in groups.values() for part in self.split(roles, turn)]

    def split(self, roles: list[str], turn: TurnPrompts) -> list[list[str]]:
        """
        Splits a group of agents if their prompts differ so much in length that padding adds more than a quarter of the
        tokens. Under ZeRO-3, the processes must agree on the number of calls, and each call gathers the base.
        """
        lengths = [len(ids) for role in roles for ids in turn.prompt_ids[role]]
        completions = len(lengths) * turn.num_generations * self.max_new_tokens
        padded = max(lengths, default=0) * len(lengths)
        is_little = padded + completions <= MOST_PADDING * (sum(lengths) + completions)
        return [roles] if is_little or is_deepspeed_zero3_enabled() else [[x] for x in roles]

    @contextlib.contextmanager
    def computing(self, roles: list[str]) -> Iterator[tuple[PreTrainedModel, Stacked | None]]:
        """Makes agents ready to sample within the block."""
        with self.team.evaluating(), self.team.together(roles) as sampling:
            yield sampling

    def sample(
        self, model: PreTrainedModel, group: Stacked | None, roles: list[str], turn: TurnPrompts
    ) -> dict[str, list[list[Completion]]]:
        """
        Samples the completions of some agents, see [`~models.generation.generate_groups`]. Nodes with the same prompt
        read it once.
        """
        given, tokenizers = self.arguments.get("eos_token_id"), self.team.tokenizers
        ends = [self.team.end_tokens(role) if given is None else np.atleast_1d(given).tolist() for role in roles]
        special = {
            "pad_token_id": tokenizers[roles[0]].pad_token_id,
            "eos_token_id": [token for ids in ends for token in ids],
        }
        stops = [(tokenizers[role], self.stop_strings.get(role, ())) for role in roles]
        seeds = [self.seeds(role, turn) for role in roles]
        distinct: dict[tuple[int, ...], list[int]] = {}  # for each agent and prompt, the nodes with this prompt
        for agent, role in enumerate(roles):
            for k, ids in enumerate(turn.prompt_ids[role]):
                distinct.setdefault((agent, *ids), []).append(k)
        groups = generate_groups(
            model,
            [ids for _, *ids in distinct],
            [[x for k in nodes for x in seeds[agent][k]] for (agent, *_), nodes in distinct.items()],
            GenerationConfig(**{**special, **self.arguments}),
            self.token_budget,
            Agents(ends, stops, group),
            [agent for agent, *_ in distinct],
        )
        completions: dict[str, list[list[Completion]]] = {role: [[]] * len(turn.prompt_ids[role]) for role in roles}
        for (agent, *_), nodes, ids in zip(distinct, distinct.values(), groups, strict=True):
            for position, k in enumerate(nodes):
                completions[roles[agent]][k] = ids[position * turn.num_generations :][: turn.num_generations]
        return completions

    def seeds(self, role: str, turn: TurnPrompts) -> list[list[int]]:
        """Returns a seed for each completion of an agent."""
        nodes, numbers = turn.nodes[role], range(turn.num_generations)
        if self.seed is None:
            drawn = int(torch.randint(2**62, ()))
            return [[derive_seed(drawn, k, g) for g in numbers] for k in range(len(nodes))]
        stream = (self.seed, turn.stream) if turn.stream else (self.seed,)
        seeds = []
        for node in nodes:
            place = (*stream, node.tree, node.episode, len(node.history), role)
            # In an episode, there is one path and one completion
            paths = [()] if node.episode is not None else [(*node.path, g) for g in numbers]
            seeds.append([derive_seed(*place, *path) for path in paths])
        return seeds


class TeamSampler:
    """
    Samples the completions of all agents at the nodes of a turn. It can be passed to [`~rollout.tree.grow_trees`] and
    [`~rollout.tree.play_episodes`].

    Args:
        team ([`AgentTeam`]): The team.
        generator ([`Generator`]): Samples the completions.
        use_chat_template (`bool`, *optional*):
            Whether prompts are rendered as chat messages. By default, they are for each agent with a
            chat template.
        history_options ([`~rollout.history.HistoryOptions`], *optional*):
            The part of their past turns that the agents see. By default, each sees all of its own prompts and
            responses.

    `stream` can be set, see [`TurnPrompts`].
    """

    stream = ""

    def __init__(
        self,
        team: SamplingTeam,
        generator: Generator,
        use_chat_template: bool | None = None,
        history_options: HistoryOptions = FULL_HISTORY,
    ):
        self.team = team
        self.generator = generator
        self.use_chat_template = use_chat_template
        self.history_options = history_options
        for role, kwargs in team.chat_template_kwargs.items():
            check_template_kwargs(f"`chat_template_kwargs` of {role!r}", kwargs)

    def template_kwargs(self, role: str) -> dict[str, Any]:
        """Returns the arguments of an agent's chat template."""
        return template_kwargs(self.team.reasoning[role], self.team.chat_template_kwargs[role])

    @property
    def chat_roles(self) -> frozenset[str]:
        """The roles with chat messages as prompts."""
        tokenizers = self.team.tokenizers.items()
        return frozenset(role for role, x in tokenizers if uses_chat_template(x, self.use_chat_template))

    def __call__(self, nodes: list[Node], num_generations: int) -> dict[str, list[Samples]]:
        return self.sample(self.team.roles, nodes, num_generations)

    def sample(self, roles: Sequence[str], nodes: list[Node], num_generations: int) -> dict[str, list[Samples]]:
        """Samples the completions of some agents; one entry per node at which the agent acts."""
        own = {role: acting(role, nodes) for role in roles}
        prompts = {role: self.prompts(role, own[role]) for role in roles}
        prompt_ids = {role: [prompt.ids for prompt in prompts[role]] for role in roles}
        for role in roles:
            longest = max(map(len, prompt_ids[role]), default=0)
            what = f"A prompt of {role!r} with its completion"
            check_length(what, self.team.agents[role], longest + self.generator.max_new_tokens)
        completions = self.generator.generate(TurnPrompts(own, prompt_ids, num_generations, self.stream))
        samples: dict[str, list[Samples]] = {role: [] for role in roles}
        for role in roles:
            tokenizer, end_tokens = self.team.tokenizers[role], self.team.end_tokens(role)
            reader = CompletionReader(tokenizer)
            for node, prompt, sampled in zip(own[role], prompts[role], completions[role], strict=True):
                call = call_of(node.prompts[role])
                stop_strings = (*self.generator.stop_strings.get(role, ()), *call.stop)
                if call.stop or call.max_tokens is not None:
                    cut_off(sampled, call, reader)
                texts = reader.texts(sampled.ids)
                facts = (prompt.prompt, prompt.dropped_turns, stop_strings)
                made = Samples(prompt.ids, sampled.ids, texts, sampled.logps, *facts)
                made.truncated = [not made.is_finished(g, end_tokens) for g in range(len(texts))]
                parts = reader.read(prompt.ids, sampled.ids, texts)
                if self.team.reasoning[role] != "keep":
                    made.answers = [answer for _, answer in parts]
                made.messages = [reader.message(text, *x) for text, x in zip(texts, parts, strict=True)]
                samples[role].append(made)
        return samples

    def prompts(self, role: str, nodes: list[Node]) -> list[WholePrompt]:
        """Makes an agent's prompts at nodes at which it acts, with the visible part of its past turns."""
        tokenizer, kwargs = self.team.tokenizers[role], self.template_kwargs(role)
        try:
            prompts = tokenize_nodes(
                role,
                nodes,
                tokenizer,
                end_tokens=self.team.end_tokens(role),
                as_chat=role in self.chat_roles,
                options=self.history_options,
                tokenize=partial(tokenize_prompts, tokenizer, **kwargs),
                render=partial(render_chat, tokenizer, **kwargs),
            )
        except TemplateError as error:
            raise UnavailableError(
                f"The chat template of agent {role!r} ({tokenizer.name_or_path}) refuses its prompt: {error}. Many "
                "templates take no system message, or only user and assistant in turn: write everything into one "
                "message of the user, or set `use_chat_template: false`."
            ) from error
        if not all(prompt.ids for prompt in prompts):
            raise ValueError(
                f"A prompt of agent {role!r} has no tokens: the environment must return prompts that have some."
            )
        return prompts

    def check_items(self, items: Sequence[dict], environment: Environment, num_turns: int) -> None:
        """
        Checks the first prompts of the first item. The environment keeps its state. Warns if a role acts in no turn.

        Raises:
            ValueError: a prompt has no tokens, or it is a chat and the tokenizer has no chat template.
        """
        state = copy.deepcopy(environment.state_dict())
        nodes = first_nodes([items[0]], environment) if len(items) else []
        for role in self.team.roles:
            own = acting(role, nodes)
            self.prompts(role, own)
            if own and role in self.chat_roles:
                warn_of_markers(role, self.team.tokenizers[role], own[0].prompts[role])
            if nodes and not own and num_turns == 1:
                logger.warning(f"{role!r} is not asked in the first turn, and `num_turns` is 1: raise it.")
        if state:
            environment.load_state_dict(state)


def warn_of_markers(role: str, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> None:
    """Warns if a prompt already has the tokens of a chat, to which the chat template would be applied again."""
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    markers = [token for token in tokenizer.all_special_tokens if any(token in text for text in texts)]
    if markers:
        logger.warning(
            f"A prompt of {role!r} contains {', '.join(markers)}, which it reads as ordinary text, because its chat "
            "template is applied to it: write prompts without such tokens, or set `use_chat_template: false`."
        )


def cut_off(sampled: Completions, call: AgentCall, reader: CompletionReader) -> None:
    """Cuts completions off, in place, at the limit of their question or after the first of its stop strings."""
    for g, ids in enumerate(sampled.ids):
        length = len(ids) if call.max_tokens is None else min(len(ids), call.max_tokens)
        texts = (reader.texts([ids[:k]])[0] for k in range(1, length + 1) if call.stop)
        stops = (k for k, text in enumerate(texts, start=1) if any(string in text for string in call.stop))
        length = next(stops, length)
        sampled.ids[g] = ids[:length]
        if sampled.logps is not None:
            sampled.logps[g] = sampled.logps[g][:length]


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], /, **kwargs: Any) -> str:
    """
    Returns the text of chat messages that [`tokenize_prompts`] tokenizes. Some chat templates take contents as lists
    of parts alone, as SmolVLM's does, refuse empty answers, as Ministral's does, or refuse or leave out the results of
    tools, as Gemma's does: these become messages of the user. Calls that a model wrote in another form, see
    [`~models.reasoning.CompletionReader.message`], get the template's form, if their results follow.
    """
    from trl_multiagent.models.tool_calls import find_calls, read_calls

    template = tokenizer.get_chat_template()
    asked, answered = ("user", ""), ("assistant", CONTENT)
    takes_results = CONTENT in probe(template, asked, answered, ("tool", CONTENT)).replace(CONTENT, "", 1)
    messages, result = [*messages], -1  # the place of the next result that the template takes
    for k, message in enumerate(messages):
        if isinstance(calls := message.get("tool_calls"), str):
            messages[k] = {"role": "assistant", "content": calls}
            with contextlib.suppress(*MALFORMED):  # a malformed call stays a text
                if messages[k + 1]["role"] == "tool":
                    found = [{"function": call} for text in find_calls(calls) for call in read_calls(text)]
                    messages[k], result = {**message, "tool_calls": found}, k + 1
        elif message["role"] == "tool" and k == result:
            result += 1
        elif message["role"] == "tool" and not takes_results:
            messages[k] = {**message, "role": "user"}
    if not probe(template, asked, ("assistant", "")) and probe(template, asked, answered):
        messages = [{**message, "content": message["content"] or " "} for message in messages]
    if CONTENT not in (probe(template, ("user", CONTENT)) or CONTENT):  # it may demand other messages
        messages = prepare_multimodal_messages(messages)
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **kwargs)
    except TypeError as error:  # a template joins a number and a text
        raise TemplateError(f"with {kwargs}: {error}") from error


@lru_cache
def probe(template: str, *messages: tuple[str, str]) -> str:
    """Returns what a chat template makes of messages, each a role and a content. It is empty if it refuses them."""
    chat = [{"role": role, "content": content} for role, content in messages]
    with contextlib.suppress(TemplateError):
        return render_jinja_template([chat], chat_template=template, bos_token="", eos_token="")[0][0]
    return ""


def tokenize_prompts(tokenizer: PreTrainedTokenizerBase, prompts: list[Any], /, **kwargs: Any) -> list[list[int]]:
    """Returns the token ids of texts, or of lists of chat messages. `kwargs`: arguments of the chat template."""
    if isinstance(prompts[0], str):
        ids, begin, end = tokenizer(prompts)["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token
        if len(ids[0]) > 1 and ids[0][-1] == tokenizer.eos_token_id and not prompts[0].endswith(str(end)):
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path!r} ends every prompt with {end}, so that a completion would "
                "begin after the end of the text: load it with `add_eos_token=False`."
            )
        # A prompt that begins with the token itself would get a second one
        return [own[1:] if own[:2] == [begin, begin] else own for own in ids]
    texts = [render_chat(tokenizer, messages, **kwargs) for messages in prompts]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def check_stop_strings(stop_strings: Mapping[str, Sequence[str]] | None, roles: Sequence[str]) -> None:
    """Raises `ValueError` if stop strings are not lists of texts, by role."""
    for role, strings in (stop_strings or {}).items():
        if role not in roles or isinstance(strings, str) or not all(isinstance(x, str) and x for x in strings):
            raise ValueError(f"`stop_strings` is {stop_strings}; it must have lists of texts for {', '.join(roles)}.")

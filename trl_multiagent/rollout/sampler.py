"""
Samples the completions of a team. Training, evaluation, the collection of preferences and `AgentTeam.collaborate` use
the same sampler.

[`TeamSampler`] makes the prompts of all agents at the nodes of a turn, and checks their lengths. A [`Generator`] then
samples the completions of all agents in one call.
"""

import io
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMode
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from trl_multiagent.environments.base import AgentCall, Environment, Prompt, Reply, as_messages, call_of
from trl_multiagent.environments.task_errors import UnavailableError, task_code
from trl_multiagent.models.generation import Agents, Completion, Sampled, generate_groups
from trl_multiagent.models.grouped_lora import Stacked
from trl_multiagent.models.packing import is_little_padding
from trl_multiagent.models.pretrained import check_length
from trl_multiagent.models.reasoning import CompletionReader, Reasoning, check_template_kwargs
from trl_multiagent.rollout.history import WholePrompt, tokenize_nodes, uses_chat_template
from trl_multiagent.rollout.options import HistoryOptions
from trl_multiagent.rollout.tree import ByRole, Node, Samples, acting, derive_seed, first_nodes, grouped


logger = logging.get_logger(__name__)

END_SETTINGS = {"min_new_tokens", "min_length", "exponential_decay_length_penalty", "forced_eos_token_id"}


class SamplingTeam(Protocol):
    """The part of an [`AgentTeam`] that sampling needs."""

    roles: tuple[str, ...]
    agents: dict[str, PreTrainedModel]  # without their adapters
    tokenizers: dict[str, PreTrainedTokenizerBase]
    reasoning: dict[str, Reasoning]
    chat_template_kwargs: dict[str, dict[str, Any]]
    joinable: dict[str, str]  # the agents that can compute together with others, each with the name of its model

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


class Generator(Protocol):
    """Samples the completions of all agents of a turn."""

    max_new_tokens: int  # of a completion
    stop_strings: Mapping[str, Sequence[str]]  # strings that end a completion, by role

    def generate(self, turn: TurnPrompts) -> Sampled:
        """Returns the completions of each prompt, for each agent in `turn.prompt_ids`."""
        ...


class TransformersGenerator:
    """
    Samples with transformers. Agents on one base, or with shared weights, sample in one call, unless that would need
    much padding.

    `arguments`: all fields of [`~transformers.GenerationConfig`] that sampling needs, see [`sampling_arguments`].
    `token_budget`: upper bound of prompt and completion tokens in one `generate` call. `stop_strings`: see
    [`Generator`]. The draws of a completion depend only on the `seed`, the stream, the item's number, the episode or
    the path of joint actions, the turn, the role and the completion's number.
    """

    def __init__(
        self,
        team: SamplingTeam,
        arguments: dict[str, Any],
        token_budget: int | None = None,
        stop_strings: Mapping[str, Sequence[str]] | None = None,
        seed: int | str = 0,
    ):
        self.team = team
        self.seed = seed
        self.arguments = arguments
        self.token_budget = token_budget
        self.stop_strings = stop_strings or {}
        self.max_new_tokens = arguments["max_new_tokens"]

    def generate(self, turn: TurnPrompts) -> Sampled:
        completions: Sampled = {}
        for roles in self.calls(turn):
            with self.computing(roles) as (model, group):
                completions |= self.sample(model, group, roles, turn)
        return completions

    def calls(self, turn: TurnPrompts) -> list[list[str]]:
        """
        Returns the agents of each call. A group of agents is split if their prompts differ so much in length that
        padding adds more than a quarter of the tokens. Under ZeRO-3, the processes must agree on the number of calls,
        and each call gathers the base.
        """
        joinable, groups = self.team.joinable, dict[Any, list[str]]()
        mode = GenerationConfig(**self.arguments).get_generation_mode()
        for role in turn.prompt_ids:
            joins = role in joinable and mode in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)
            # Some settings change the probability of end tokens, so agents in one call must have the same ones
            ends = self.team.end_tokens(role) if END_SETTINGS & self.arguments.keys() else ()
            groups.setdefault((joinable[role], *ends) if joins else role, []).append(role)
        calls = []
        for roles in groups.values():
            room = turn.num_generations * self.max_new_tokens
            lengths = [len(ids) + room for role in roles for ids in turn.prompt_ids[role]]
            joins = is_little_padding(lengths) or is_deepspeed_zero3_enabled()
            calls += [roles] if joins else [[role] for role in roles]
        return calls

    @contextmanager
    def computing(self, roles: list[str]) -> Iterator[tuple[PreTrainedModel, Stacked | None]]:
        """Makes agents ready to sample within the block."""
        agent = self.team.agents[roles[0]]
        kind = agent.device.type
        # Copied modules are float32 even if their base is not. A trainer has its own autocast
        mixes = not torch.is_autocast_enabled(kind) and any(
            "modules_to_save" in name and x.dtype != agent.dtype for name, x in agent.named_parameters()
        )
        cast = torch.autocast(kind, agent.dtype) if mixes else nullcontext()
        eagerly = torch.compiler.set_stance("force_eager")  # layers are compiled for the update
        with cast, eagerly, self.team.evaluating(), self.team.together(roles) as sampling:
            yield sampling

    def sample(self, model: PreTrainedModel, group: Stacked | None, roles: list[str], turn: TurnPrompts) -> Sampled:
        """
        Samples the completions of some agents, see [`~models.generation.generate_groups`]. Nodes with the same prompt
        read it once.
        """
        ends, tokenizers = [self.team.end_tokens(role) for role in roles], self.team.tokenizers
        arguments = {
            **self.arguments,
            "pad_token_id": tokenizers[roles[0]].pad_token_id,
            "eos_token_id": [token for ids in ends for token in ids],
        }
        stops = [(tokenizers[role], self.stop_strings.get(role, ())) for role in roles]
        seeds = [self.seeds(role, turn) for role in roles]
        # For each agent and prompt, the nodes with this prompt
        distinct = grouped(
            ((agent, *ids), k) for agent, role in enumerate(roles) for k, ids in enumerate(turn.prompt_ids[role])
        )
        groups = generate_groups(
            model,
            [ids for _, *ids in distinct],
            [[x for k in nodes for x in seeds[agent][k]] for (agent, *_), nodes in distinct.items()],
            GenerationConfig(**arguments),
            self.token_budget,
            Agents(ends, stops, group),
            [agent for agent, *_ in distinct],
        )
        completions: Sampled = {role: [[]] * len(turn.prompt_ids[role]) for role in roles}
        for (agent, *_), nodes, ids in zip(distinct, distinct.values(), groups, strict=True):
            for position, k in enumerate(nodes):
                completions[roles[agent]][k] = ids[position * turn.num_generations :][: turn.num_generations]
        return completions

    def seeds(self, role: str, turn: TurnPrompts) -> list[list[int]]:
        """Returns a seed for each completion of an agent."""
        nodes, numbers = turn.nodes[role], range(turn.num_generations)
        stream = (self.seed, turn.stream) if turn.stream else (self.seed,)
        seeds = []
        for node in nodes:
            place = (*stream, node.tree, node.episode, len(node.history), role)
            # In an episode, there is one path and one completion
            paths = [()] if node.episode is not None else [(*node.path, g) for g in numbers]
            seeds.append([derive_seed(*place, *path) for path in paths])
        return seeds


@dataclass(eq=False)
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

        stream (`str`, *optional*): See [`TurnPrompts`].
    """

    team: SamplingTeam
    generator: Generator
    use_chat_template: bool | None = None
    history_options: HistoryOptions = field(default_factory=HistoryOptions)
    stream: str = ""

    def __post_init__(self) -> None:
        for role, kwargs in self.team.chat_template_kwargs.items():
            check_template_kwargs(f"`chat_template_kwargs` of {role!r}", kwargs)

    def template_kwargs(self, role: str) -> dict[str, Any]:
        """Returns the arguments of an agent's chat template."""
        thinking = {"enable_thinking": False} if self.team.reasoning[role] == "none" else {}
        return {**thinking, **self.team.chat_template_kwargs[role]}

    @property
    def chat_roles(self) -> frozenset[str]:
        """The roles with chat messages as prompts."""
        tokenizers = self.team.tokenizers.items()
        return frozenset(role for role, x in tokenizers if uses_chat_template(x, self.use_chat_template))

    def __call__(self, nodes: list[Node], num_generations: int) -> ByRole:
        return self.sample(self.team.roles, nodes, num_generations)

    def sample(self, roles: Sequence[str], nodes: list[Node], num_generations: int) -> ByRole:
        """Samples the completions of some agents; one entry per node at which the agent acts."""
        own = {role: acting(role, nodes) for role in roles}
        prompts = {role: self.prompts(role, own[role]) for role in roles}
        prompt_ids = {role: [prompt.ids for prompt in prompts[role]] for role in roles}
        for role in roles:
            longest = max(map(len, prompt_ids[role]), default=0)
            what = f"A prompt of {role!r} with its completion"
            check_length(what, self.team.agents[role], longest + self.generator.max_new_tokens)
        completions = self.generator.generate(TurnPrompts(own, prompt_ids, num_generations, self.stream))
        samples: ByRole = {role: [] for role in roles}
        for role in roles:
            tokenizer, end_tokens = self.team.tokenizers[role], self.team.end_tokens(role)
            reader, keeps_reasoning = CompletionReader(tokenizer), self.team.reasoning[role] == "keep"
            for node, prompt, sampled in zip(own[role], prompts[role], completions[role], strict=True):
                call = call_of(node.prompts[role])
                stop_strings = (*self.generator.stop_strings.get(role, ()), *call.stop)
                if call.stop or call.max_tokens is not None:
                    sampled = [cut_off(ids, call, reader) for ids in sampled]
                ids, logps = [[*x] for x in sampled], [x.logps for x in sampled]
                texts = reader.texts(ids)
                made = Samples(prompt.ids, ids, texts, logps, prompt.prompt, prompt.dropped_turns, stop_strings)
                made.replies = [
                    Reply.of(
                        text if keeps_reasoning else answer,
                        text,
                        not made.is_finished(g, end_tokens),
                        reader.message(text, reasoning, answer),
                    )
                    for g, (text, (reasoning, answer)) in enumerate(
                        zip(texts, reader.read(prompt.ids, ids, texts), strict=True)
                    )
                ]
                samples[role].append(made)
        return samples

    def prompts(self, role: str, nodes: list[Node]) -> list[WholePrompt]:
        """Makes an agent's prompts at nodes at which it acts, with the visible part of its past turns."""
        tokenizer = self.team.tokenizers[role]
        try:
            prompts = tokenize_nodes(
                role,
                nodes,
                tokenizer,
                self.team.end_tokens(role),
                role in self.chat_roles,
                self.history_options,
                self.template_kwargs(role),
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
        name, file = type(environment).__name__, io.BytesIO()
        with task_code(f"`{name}.state_dict`, which has to return plain values and tensors,"):
            torch.save(environment.state_dict(), file)
            file.seek(0)
            state = torch.load(file, weights_only=True)  # as when a run is resumed
        nodes = first_nodes([items[0]], environment) if len(items) else []
        for role in self.team.roles:
            own = acting(role, nodes)
            self.prompts(role, own)
            if own and role in self.chat_roles:
                warn_of_markers(role, self.team.tokenizers[role], own[0].prompts[role])
            if nodes and not own and num_turns == 1:
                logger.warning(f"{role!r} is not asked in the first turn, and `num_turns` is 1: raise it.")
        if state:
            with task_code(f"`{name}.load_state_dict`"):
                environment.load_state_dict(state)


def warn_of_markers(role: str, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> None:
    """Warns if a prompt already has the tokens of a chat, to which the chat template would be applied again."""
    texts = [message["content"] for message in as_messages(prompt)]
    markers = [token for token in tokenizer.all_special_tokens if any(token in text for text in texts)]
    if markers:
        logger.warning(
            f"A prompt of {role!r} contains {', '.join(markers)}, which it reads as ordinary text, because its chat "
            "template is applied to it: write prompts without such tokens, or set `use_chat_template: false`."
        )


def cut_off(ids: Completion, call: AgentCall, reader: CompletionReader) -> Completion:
    """Cuts a completion off at the limit of its question or after the first of its stop strings."""
    length = len(ids[: call.max_tokens])

    def stops(length: int) -> bool:
        (text,) = reader.texts([ids[:length]])
        return any(string in text for string in call.stop)

    if call.stop:
        length = min(length, 1 + bisect_left(range(1, length + 1), True, key=stops))
    return Completion(ids[:length], ids.logps[:length])


def check_stop_strings(stop_strings: Mapping[str, Sequence[str]] | None, roles: Sequence[str]) -> None:
    """Raises `ValueError` if stop strings are not lists of texts, by role."""
    for role, strings in (stop_strings or {}).items():
        if role not in roles or isinstance(strings, str) or not all(isinstance(x, str) and x for x in strings):
            raise ValueError(f"`stop_strings` is {stop_strings}; it must have lists of texts for {', '.join(roles)}.")

"""Samples completions with a team without a trainer."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from trl_multiagent.models.generation import generate_groups
from trl_multiagent.rollout.history import uses_chat_template, whole_prompt
from trl_multiagent.rollout.tree import Node, Samples


class SamplingTeam(Protocol):
    """The part of an [`AgentTeam`] that sampling needs."""

    roles: tuple[str, ...]
    tokenizers: dict[str, PreTrainedTokenizerBase]

    def activate(self, role: str) -> AbstractContextManager[PreTrainedModel]: ...

    def evaluating(self) -> AbstractContextManager[None]: ...

    def end_tokens(self, role: str) -> list[int]: ...


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
        token_budget (`int`, *optional*):
            Upper bound of the number of prompt and completion tokens in one `generate` call. By default, there is none.
        **generation_kwargs:
            Fields of [`~transformers.GenerationConfig`]. By default, at most 256 tokens are sampled at temperature 1.
    """

    def __init__(
        self,
        team: SamplingTeam,
        use_chat_template: bool | None = None,
        token_budget: int | None = None,
        **generation_kwargs: Any,
    ):
        self.team = team
        self.use_chat_template = use_chat_template
        self.token_budget = token_budget
        self.generation_kwargs = generation_kwargs

    def __call__(self, nodes: list[Node], num_generations: int) -> dict[str, list[Samples]]:
        return {role: self._sample_agent(role, nodes, num_generations) for role in self.team.roles}

    def _sample_agent(self, role: str, nodes: list[Node], num_generations: int) -> list[Samples]:
        tokenizer = self.team.tokenizers[role]
        prompt_ids = [self._tokenize_node(role, node) for node in nodes]
        defaults = {"max_new_tokens": 256, "do_sample": True, "pad_token_id": tokenizer.pad_token_id}
        config = GenerationConfig(**{**defaults, "eos_token_id": self.team.end_tokens(role), **self.generation_kwargs})
        with self.team.evaluating(), self.team.activate(role) as agent:
            groups = generate_groups(agent, prompt_ids, num_generations, config, self.token_budget)
        return [
            Samples(ids, group, tokenizer.batch_decode(group, skip_special_tokens=True))
            for ids, group in zip(prompt_ids, groups, strict=True)
        ]

    def _tokenize_node(self, role: str, node: Node) -> list[int]:
        tokenizer = self.team.tokenizers[role]
        as_chat = uses_chat_template(tokenizer, self.use_chat_template)
        prompt = whole_prompt(role, node.history, node.prompts[role], as_chat)
        if as_chat:
            return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        return tokenizer(prompt)["input_ids"]

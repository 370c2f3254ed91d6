"""
Samples all completions of a turn of the rollout trees with transformers, in one call, or in several if they need too
much memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.generation import GenerationMode
from transformers.utils import logging
from trl.trainer.utils import pad

from trl_multiagent.models.grouped_lora import Stacked
from trl_multiagent.models.packing import read_packed
from trl_multiagent.models.pretrained import temporarily_set, without_router_logits
from trl_multiagent.models.sampling_loop import SamplingLoop, StopStrings
from trl_multiagent.models.shared_prompts import can_continue_cache, read_padded, repeat_prompts


logger = logging.get_logger(__name__)


@dataclass
class Agents:
    """The agents that sample in one call of one model, in the order of their numbers."""

    end_tokens: Sequence[Sequence[int]]  # for each agent, the tokens that end a completion
    # For each agent, its tokenizer and the strings that end a completion
    stops: Sequence[tuple[Tokenizer, Sequence[str]]] = ()
    group: Stacked | None = None  # the agents' adapters, if there are several


class Completion(list[int]):
    """
    The token ids of a completion. `logps`: the log-probabilities with which they were sampled, in nats; NaN if they
    are the best ones.
    """

    def __init__(self, ids: Sequence[int], logps: Sequence[float] = ()):
        super().__init__(ids)
        self.logps = [*logps]


Sampled = dict[str, list[list[Completion]]]  # of each agent, the completions of each of its prompts


@torch.no_grad()
def generate_groups(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    seeds: list[list[int]],
    generation_config: GenerationConfig,
    token_budget: int | None = None,
    agents: Agents | None = None,
    numbers: Sequence[int] | None = None,
) -> list[list[Completion]]:
    """
    Samples completions of each prompt, one per seed. A completion depends on its prompt and its seed alone, up to
    rounding.

    Each prompt is read once, and so is what prompts of an agent begin with, see [`~packing.read_packed`]. Prompts are
    padded on the left. If the budget requires several calls, prompts of similar length share a call.

    Args:
        model ([`~transformers.PreTrainedModel`]): The agent.
        prompt_ids (`list[list[int]]`): Token ids of the prompts, without padding.
        seeds (`list[list[int]]`): For each prompt the seeds of its completions.
        generation_config ([`~transformers.GenerationConfig`]): Sampling settings; `max_new_tokens`, `pad_token_id` and
            a list `eos_token_id` must be set.
        token_budget (`int`, *optional*): Upper bound of the number of prompt and completion tokens in one `generate`
            call, padding included. If the completions of a single prompt exceed it, they are sampled in several calls.
            A call samples at least one.
        agents ([`Agents`], *optional*): By default one agent; its completions end with `eos_token_id`.
        numbers (`list[int]`, *optional*): The number of the agent of each prompt. By default, there is one agent.

    Returns:
        `list[list[Completion]]`: For each prompt its completions, as token ids up to and including the end token.
    """
    completions: list[list[Completion]] = [[] for _ in prompt_ids]
    agents = Agents([generation_config.eos_token_id]) if agents is None else agents
    numbers = [0] * len(prompt_ids) if numbers is None else numbers
    sizes = [(len(ids), len(prompt_seeds)) for ids, prompt_seeds in zip(prompt_ids, seeds, strict=True)]
    for call in plan_calls(sizes, generation_config.max_new_tokens, token_budget):
        prompts, call_seeds = [prompt_ids[k] for k, _ in call], [seeds[k][part] for k, part in call]
        call_numbers = torch.tensor([numbers[k] for k, _ in call], device=model.device)
        completed = _generate(model, prompts, call_seeds, generation_config, agents, call_numbers)
        for (k, _), new_completions in zip(call, completed, strict=True):
            completions[k] += new_completions
    return completions


def plan_calls(
    sizes: list[tuple[int, int]], max_new_tokens: int, token_budget: int | None
) -> list[list[tuple[int, slice]]]:
    """
    Splits the work into `generate` calls. `sizes`: for each prompt, the number of its tokens and of its completions.
    Returns, for each call, the indices of its prompts, each with a slice of its completions.
    """
    calls: list[list[tuple[int, slice]]] = []
    if token_budget is None:
        token_budget = sum(number for _, number in sizes) * max((n + max_new_tokens for n, _ in sizes), default=0)
    room = 0  # how many more completions the last call can take
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k][0]):
        length, number = sizes[k]
        rows = max(1, token_budget // (length + max_new_tokens))  # of a call with this prompt as its longest
        start = 0
        while start < number:
            if room < min(rows, number - start):  # completions are divided only if a whole call is too small for them
                calls.append([])
                room = rows
            part = min(room, number - start)
            calls[-1].append((k, slice(start, start + part)))
            start, room = start + part, room - part
    return calls


def _generate(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    seeds: list[list[int]],
    config: GenerationConfig,
    agents: Agents,
    numbers: torch.Tensor,
) -> list[list[Completion]]:
    """Samples all completions in one call; see [`generate_groups`]."""
    tensors = [torch.tensor(ids) for ids in prompt_ids]
    input_ids = pad(tensors, padding_value=config.pad_token_id, padding_side="left").to(model.device)
    attention_mask = pad([torch.ones_like(ids) for ids in tensors], padding_value=0, padding_side="left")
    attention_mask = attention_mask.to(model.device)
    owners = torch.tensor([k for k, prompt_seeds in enumerate(seeds) for _ in prompt_seeds], device=model.device)
    length, inputs = input_ids.size(1), without_router_logits(model)
    row_agents, group = numbers[owners], agents.group
    ending = StopStrings(agents.stops, row_agents, length) if any(strings for _, strings in agents.stops) else None
    ends = pad([torch.tensor(ids) for ids in agents.end_tokens], padding_value=-1)[row_agents.cpu()]
    mode, loop = config.get_generation_mode(), None
    if mode in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        cache = None
        if can_continue_cache(model) and not config.cache_implementation:
            cache = read_packed(model, prompt_ids, numbers, group)
            if cache is None:
                if group is not None:
                    group.set_rows(numbers)
                cache = read_padded(model, input_ids, attention_mask)
            # Attention kernels copy masks of other widths
            repeat_prompts(cache, owners, -(-(length + config.max_new_tokens) // 16) * 16)
        rngs = [np.random.default_rng(seed) for prompt_seeds in seeds for seed in prompt_seeds]
        drawn = torch.from_numpy(np.stack([rng.random(config.max_new_tokens, dtype=np.float32) for rng in rngs]))
        if group is not None:
            group.set_rows(row_agents)
        loop = SamplingLoop(attention_mask[owners], drawn, ends, row_agents, group, ending, cache, {**inputs})
        inputs |= {} if cache is None else {"past_key_values": cache}
    else:
        logger.warning_once(f"{mode.value} has no seeds: its draws depend on the batch, and thus on the hardware.")
    for module in model.modules():  # Qwen's vision models keep them for the next call, which may have other rows
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None
    # The model's own settings, such as `min_p`, would replace those that the caller leaves out
    with temporarily_set(model, generation_config=GenerationConfig()):
        output_ids = model.generate(
            input_ids=input_ids[owners],
            attention_mask=attention_mask[owners],
            generation_config=config,
            stopping_criteria=None if ending is None else [ending],
            custom_generate=loop,
            synced_gpus=False,  # the caller gathers ZeRO-3 weights, and other processes may have nothing to generate
            **inputs,
        )
    completion_ids = output_ids[:, length:].cpu()
    is_eos = (completion_ids[..., None] == ends[:, None]).any(dim=-1)
    # A token is kept if no end-of-sequence token precedes it
    kept = (is_eos.cumsum(dim=1) - is_eos.long()) == 0
    if ending is not None:  # padding follows, which may be an end-of-sequence token
        kept &= torch.arange(kept.size(1)) < ending.lengths[:, None]
    logps = torch.full(kept.shape, torch.nan)
    if loop is not None and config.do_sample:
        logps = loop.numbers[:, : kept.size(1)].cpu()
    rows = zip(completion_ids, logps, kept, strict=True)
    sequences = iter([Completion(ids[mask].tolist(), own[mask].tolist()) for ids, own, mask in rows])
    return [[next(sequences) for _ in prompt_seeds] for prompt_seeds in seeds]

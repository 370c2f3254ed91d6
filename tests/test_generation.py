from collections import Counter
from itertools import pairwise

import pytest
import torch
from transformers import GenerationConfig

from trl_multiagent.models.generation import generate_groups
from trl_multiagent.models.sampling_loop import SeededChoice, StopStrings

from tiny import ARCHITECTURES, byte_tokenizer, other_model, tiny_llama


def config(**changes):
    settings = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    settings |= {"pad_token_id": 257, "eos_token_id": [256], "disable_compile": True}
    return GenerationConfig(**{**settings, **changes})


PROMPTS = [[65, 66, 67], [68] * 9, [70], [71, 72]]


def seeds_of(number):
    return [[1000 * k + g for g in range(number)] for k in range(len(PROMPTS))]


def count_calls(model, monkeypatch):
    calls = []
    generate = model.generate
    monkeypatch.setattr(
        model, "generate", lambda **kwargs: calls.append(kwargs["input_ids"].shape) or generate(**kwargs)
    )
    return calls


@pytest.mark.parametrize("architecture", ["llama", *ARCHITECTURES])
def test_greedy_groups_equal_plain_generate(architecture):
    """Models with learned positions, and models whose cache keeps only a window."""
    model = tiny_llama() if architecture == "llama" else other_model(architecture)
    greedy = config(do_sample=False, temperature=None, top_p=None, top_k=None)
    for prompt, group in zip(PROMPTS, generate_groups(model, PROMPTS, seeds_of(2), greedy), strict=True):
        plain = model.generate(input_ids=torch.tensor([prompt]), generation_config=greedy)[0, len(prompt) :].tolist()
        assert group == [plain] * 2


def test_samples_follow_the_policy():
    """The next-token frequencies of many samples match the model's probabilities, even for a padded prompt."""
    model = tiny_llama(initializer_range=0.6)
    groups = generate_groups(model, PROMPTS, seeds_of(4000), config(max_new_tokens=1))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        with torch.no_grad():
            probabilities = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        counts = torch.bincount(torch.tensor(group).flatten(), minlength=258) / 4000
        assert (counts - probabilities).abs().max() < 0.04
        assert probabilities.max() > 0.1  # far from uniform


def test_completions_end_at_their_first_end_of_sequence_token():
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[256] = model.lm_head.weight[:200].mean(0) + 0.5 * torch.ones(32)
    sequences = [ids for group in generate_groups(model, PROMPTS, seeds_of(60), config()) for ids in group]
    ended = [ids for ids in sequences if ids[-1] == 256]
    assert 20 < len(ended) < len(sequences)
    assert all(256 not in ids[:-1] for ids in sequences)
    assert all(len(ids) == 6 for ids in sequences if ids[-1] != 256)


@pytest.mark.parametrize("budget", [40, 100, 1])
def test_a_budget_splits_the_prompts_and_keeps_their_order(budget, monkeypatch):
    model = tiny_llama()
    greedy = config(do_sample=False, temperature=None, top_p=None, top_k=None)
    whole = generate_groups(model, PROMPTS, seeds_of(2), greedy)
    calls = count_calls(model, monkeypatch)
    assert generate_groups(model, PROMPTS, seeds_of(2), greedy, token_budget=budget) == whole
    assert len(calls) > 1
    assert all(rows * (length + 6) <= budget or rows == 1 for rows, length in calls)


def test_many_completions_of_one_prompt_are_split_as_well(monkeypatch):
    model = tiny_llama()
    calls = count_calls(model, monkeypatch)
    groups = generate_groups(model, PROMPTS, seeds_of(7), config(), token_budget=32)
    assert [len(group) for group in groups] == [7] * 4
    assert calls == [(2, 9)] * 3 + [(1, 9)] + [(3, 3)] * 2 + [(1, 3)] + [(4, 2), (3, 2)] + [(4, 1), (3, 1)]


def test_no_prompts_need_no_call():
    assert generate_groups(tiny_llama(), [], [], config()) == []


def test_seeded_completions_do_not_depend_on_their_batch():
    model = tiny_llama()
    seeds = [[10 * k + g for g in range(4)] for k in range(len(PROMPTS))]
    state = torch.get_rng_state()
    whole = generate_groups(model, PROMPTS, seeds, config())
    assert torch.get_rng_state().equal(state)  # nothing is drawn from the global generator
    assert whole == generate_groups(model, PROMPTS, seeds, config())
    assert whole == generate_groups(model, PROMPTS, seeds, config(), token_budget=32)  # in several calls
    alone = [generate_groups(model, [PROMPTS[1]], [[seed]], config())[0][0] for seed in seeds[1]]
    assert alone == whole[1] and len({tuple(ids) for ids in alone}) > 1
    greedy = config(do_sample=False)
    assert generate_groups(model, PROMPTS, seeds, greedy) == generate_groups(model, PROMPTS, [[0] * 4] * 4, greedy)


def test_seeded_sampling_follows_the_probabilities():
    """Also with the nucleus of the settings, and never a token without probability."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -torch.inf]])
    numbers = torch.linspace(0, 1, 2001)[:, None]  # as random numbers of many rows, 1.0 included
    choice = SeededChoice(numbers, prompt_length=1)
    chosen = choice(torch.zeros(2001, 1, dtype=torch.long), logits.expand(2001, -1)).argmax(dim=1)
    shares = torch.bincount(chosen, minlength=4) / 2001
    assert torch.allclose(shares, logits.softmax(dim=-1)[0], atol=1e-3) and shares[3] == 0
    groups = generate_groups(tiny_llama(), PROMPTS, [[*range(500)]] * len(PROMPTS), config(max_new_tokens=1, top_k=3))
    for group in groups:
        assert len({tuple(ids) for ids in group}) == 3


@pytest.mark.parametrize("pad", [257, 256])
def test_stop_strings_end_completions(pad):
    """A completion is that without stop strings, up to the token that completes one. The padding behind it is no end of sequence."""
    model, tokenizer = tiny_llama(initializer_range=0.2), byte_tokenizer()
    settings = config(max_new_tokens=12, pad_token_id=pad)
    seeds = [[10 * k + g for g in range(40)] for k in range(len(PROMPTS))]
    whole = generate_groups(model, PROMPTS, seeds, settings)
    pairs = Counter(pair for group in whole for ids in group for pair in pairwise(ids[:-1]) if max(pair) < 94)
    pair = max(pairs, key=pairs.get)  # letters
    singles = Counter(token for group in whole for ids in group for token in ids if token < 94).most_common(5)
    strings = [tokenizer.decode(pair), *(tokenizer.decode([token]) for token, _ in singles if token not in pair)]
    stopped = generate_groups(model, PROMPTS, seeds, settings, stops=[(tokenizer, strings)])
    split = generate_groups(model, PROMPTS, seeds, settings, token_budget=64, stops=[(tokenizer, strings)])

    def cut(ids):
        texts = [tokenizer.decode(ids[: k + 1], skip_special_tokens=True) for k in range(len(ids))]
        return ids[: 1 + next((k for k, text in enumerate(texts) if any(x in text for x in strings)), len(ids))]

    assert stopped == split == [[cut(ids) for ids in group] for group in whole]
    lengths = Counter(len(ids) for group in stopped for ids in group)
    assert lengths[12] > 40 and sum(lengths.values()) - lengths[12] > 40 and len(lengths) > 8
    assert generate_groups(model, PROMPTS, seeds, settings, stops=[(tokenizer, [])]) == whole


def test_stop_strings_are_not_found_in_the_prompt():
    model, tokenizer = tiny_llama(), byte_tokenizer()
    greedy = config(do_sample=False, temperature=None, top_p=None, top_k=None)
    (((first, *_),),) = generate_groups(model, [[65, 66]], [[0]], greedy)
    strings = [tokenizer.decode([66, first]), "AB"]
    ((ids,),) = generate_groups(model, [[65, 66]], [[0]], greedy, stops=[(tokenizer, strings)])
    assert len(ids) == 6


def test_a_token_that_goes_beyond_a_stop_string_is_kept():
    """Bytes of a character that is split, and a token with more than the string."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["}\n\n"])
    long = tokenizer.convert_tokens_to_ids("}\n\n")
    euro = tokenizer("€")["input_ids"]
    ends = StopStrings([(tokenizer, ["}\n", "€"])], torch.zeros(3, dtype=torch.long), 2)
    rows = [[65, 66, 67, long, 68, 69], [euro[2]] * 2 + [65, *euro], [65] * 6]
    ended = [ends(torch.tensor(rows)[:, :length], None).tolist() for length in (3, 4, 5, 6)]
    assert ended == [[False] * 3, [True, False, False], [True, False, False], [True, True, False]]
    assert ends.lengths.tolist() == [2, 4, torch.inf]

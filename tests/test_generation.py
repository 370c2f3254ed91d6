from collections import Counter
from itertools import pairwise

import pytest
import torch
from datasets import Dataset
from pairs import pair_trainer, pairs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import GenerationConfig, GPT2Config, GPT2ForSequenceClassification

from trl_multiagent import AgentTeam, FunctionEnvironment
from trl_multiagent.environments.reward_models import RewardModel
from trl_multiagent.models import generation, sampling_loop
from trl_multiagent.models.generation import Agents, generate_groups
from trl_multiagent.models.pretrained import TooLongError, check_length
from trl_multiagent.models.sampling_loop import FixedToken, GrowingToken, StopStrings
from trl_multiagent.models.shared_prompts import RoomyLayer

from tiny import ARCHITECTURES, byte_tokenizer, count_reward, other_model, tiny_llama


def config(**changes):
    settings = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    settings |= {"pad_token_id": 257, "eos_token_id": [256], "disable_compile": True}
    return GenerationConfig(**{**settings, **changes})


PROMPTS = [[65, 66, 67], [68] * 9, [70], [71, 72]]
ALIKE = [[*range(40, 60), *rest] for rest in ([70], [71, 72], [73] * 4, [71, 74])]
GREEDY = config(do_sample=False, temperature=None, top_p=None, top_k=None)


def seeds_of(number):
    return [[1000 * k + g for g in range(number)] for k in range(len(PROMPTS))]


def count_calls(model, monkeypatch):
    calls, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda **given: calls.append(given["input_ids"].shape) or generate(**given))
    return calls


@pytest.mark.parametrize("prompts", [PROMPTS, ALIKE], ids=["different", "alike"])
@pytest.mark.parametrize("architecture", ["llama", *ARCHITECTURES])
def test_greedy_groups_equal_plain_generate(architecture, prompts):
    """Models with learned positions, and models whose cache keeps only a window."""
    model = tiny_llama() if architecture == "llama" else other_model(architecture)
    for prompt, group in zip(prompts, generate_groups(model, prompts, seeds_of(2), GREEDY), strict=True):
        plain = model.generate(input_ids=torch.tensor([prompt]), generation_config=GREEDY)[0, len(prompt) :].tolist()
        assert group == [plain] * 2


@pytest.mark.parametrize("agents", [1, 2])
def test_what_prompts_of_an_agent_begin_with_is_read_once(agents):
    model, shapes = tiny_llama(), []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    numbers = [k % agents for k in range(len(ALIKE))]
    generate_groups(model, ALIKE, seeds_of(2), GREEDY, None, Agents([[256]] * agents), numbers)
    # All tokens but the last ones of prompts. Each prompt reads the last token that it shares with another once more
    assert shapes[0] == {1: (1, 20 + 2 + 1 + 4), 2: (2, 20 + 4)}[agents]


def test_minimal_lengths_are_kept_by_our_own_loop(monkeypatch):
    """As the benchmarks ask for: each completion has the same number of tokens."""
    calls, run = [], sampling_loop.SamplingLoop.run
    monkeypatch.setattr(sampling_loop.SamplingLoop, "run", lambda *args: calls.append(1) or run(*args))
    ends = list(range(0, 258, 2))
    for name, number in (("min_new_tokens", 6), ("min_length", 15)):
        groups = generate_groups(tiny_llama(), PROMPTS, seeds_of(3), config(eos_token_id=ends, **{name: number}))
        assert {len(ids) for group in groups for ids in group} == {6}
    assert len(calls) == 2


WARPED = [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"repetition_penalty": 1.7}]
WARPED += [{"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}]


def exact_distribution(model, prompt, settings):
    """What transformers itself draws the next token from."""
    arguments = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 1}
    output = model.generate(input_ids=torch.tensor([prompt]), generation_config=config(**settings, **arguments))
    return output.scores[0][0].softmax(dim=-1)


@pytest.mark.parametrize("settings", WARPED, ids=str)
def test_samples_follow_the_policy(settings):
    """
    The frequencies of the first token are the exact probabilities, also for a padded prompt, whose padding has no
    penalty. With 3000 seeds the error of a frequency is at most 0.0091, and no token outside of the nucleus is drawn.
    """
    model = tiny_llama(initializer_range=0.6)
    groups = generate_groups(model, PROMPTS, seeds_of(3000), config(max_new_tokens=1, **settings))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        probabilities = exact_distribution(model, prompt, settings)
        counts = torch.bincount(torch.tensor(group).flatten(), minlength=258) / 3000
        assert (counts - probabilities).abs().max() < 0.03
        assert not counts[probabilities == 0].any() and probabilities.max() > 0.1  # far from uniform


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
    whole = generate_groups(model, PROMPTS, seeds_of(2), GREEDY)
    calls = count_calls(model, monkeypatch)
    assert generate_groups(model, PROMPTS, seeds_of(2), GREEDY, token_budget=budget) == whole
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


@pytest.mark.parametrize("architecture", ["llama", *ARCHITECTURES, "bloom", "lfm2"])
def test_completions_do_not_depend_on_their_batch(architecture):
    """
    Nor on the order, nor on the budget. Rows end at many lengths, some at their first token; a penalty does not see
    the padding.
    """
    model = tiny_llama(initializer_range=0.3) if architecture == "llama" else other_model(architecture)
    settings = config(max_new_tokens=24, repetition_penalty=1.2, top_k=100, eos_token_id=[256, *range(0, 256, 9)])
    seeds = seeds_of(4)
    state = torch.get_rng_state()
    whole = generate_groups(model, PROMPTS, seeds, settings)
    assert torch.get_rng_state().equal(state)  # nothing is drawn from the global generator
    lengths = {len(ids) for group in whole for ids in group}
    assert 1 in lengths and len(lengths) > 4
    assert whole == generate_groups(model, PROMPTS, seeds, settings, token_budget=90)  # in several calls
    backwards = generate_groups(model, PROMPTS[::-1], [x[::-1] for x in seeds[::-1]], settings)
    assert whole == [group[::-1] for group in backwards[::-1]]
    alone = [generate_groups(model, [PROMPTS[2]], [[seed]], settings)[0][0] for seed in seeds[2]]
    assert alone == whole[2] and len({tuple(ids) for ids in alone}) > 1


@pytest.mark.parametrize(
    ("architecture", "settings", "named"),
    [
        ("bloom", {}, "the cache of BloomForCausalLM"),
        ("lfm2", {}, "the cache of Lfm2ForCausalLM"),
        ("llama", {"no_repeat_ngram_size": 12}, "NoRepeatNGramLogitsProcessor"),
        ("llama", {"cache_implementation": "static"}, "the cache of LlamaForCausalLM"),
    ],
)
def test_what_the_loop_does_not_cover_draws_the_same_in_that_of_transformers(
    architecture, settings, named, monkeypatch
):
    model = tiny_llama(initializer_range=0.1) if architecture == "llama" else other_model(architecture)
    warnings = []
    monkeypatch.setattr(sampling_loop.logger, "warning_once", warnings.append)
    other = generate_groups(model, PROMPTS, seeds_of(3), config(max_new_tokens=8, repetition_penalty=1.3, **settings))
    assert len(warnings) == 1 and named in warnings[0]
    if architecture == "llama":  # no n-gram of these completions repeats
        ours = generate_groups(model, PROMPTS, seeds_of(3), config(max_new_tokens=8, repetition_penalty=1.3))
        assert other == ours and len(warnings) == 1


@pytest.mark.parametrize("size", [1, 2])
def test_repeated_n_grams_are_those_of_the_row(size):
    """The padding of a batch repeats, but is no part of a prompt: completions do not depend on their batch."""
    model, settings = tiny_llama(initializer_range=0.1), config(max_new_tokens=8, no_repeat_ngram_size=size)
    padding = model.config.pad_token_id
    with torch.no_grad():  # which makes the padding token likely
        model.lm_head.weight[padding] += 0.1 * model.lm_head.weight.sum(0)
    seeds = seeds_of(24)
    whole = generate_groups(model, PROMPTS, seeds, settings)
    assert any(padding in ids for group in whole for ids in group)
    alone = [generate_groups(model, [x], [own], settings)[0] for x, own in zip(PROMPTS, seeds, strict=True)]
    assert whole == alone


def test_beams_are_searched_by_transformers(monkeypatch):
    warnings = []
    monkeypatch.setattr(generation.logger, "warning_once", warnings.append)
    beams = config(do_sample=False, num_beams=2, temperature=None, top_p=None, top_k=None)
    groups = generate_groups(tiny_llama(), PROMPTS, [[0]] * 4, beams)
    assert all(len(ids) == 6 for (ids,) in groups)
    assert warnings == ["beam_search has no seeds: its draws depend on the batch, and thus on the hardware."]


def test_the_loop_looks_rarely_on_a_gpu(monkeypatch):
    """Rows that run past their end are cut, at stop strings too."""
    model, tokenizer = tiny_llama(initializer_range=0.3), byte_tokenizer()
    settings = config(max_new_tokens=21, eos_token_id=[256, *range(0, 256, 9)])
    for stops in ([], [(tokenizer, ["a", "b", "!", "~", "Q"])]):
        agents = Agents([settings.eos_token_id], stops)
        expected = generate_groups(model, PROMPTS, seeds_of(8), settings, agents=agents)
        with monkeypatch.context() as patch:
            patch.setattr(sampling_loop, "period_of", lambda device: 8)
            assert generate_groups(model, PROMPTS, seeds_of(8), settings, agents=agents) == expected


class Operations(TorchDispatchMode):
    """Records the operations of a block: names, shapes, and numbers of the host."""

    def __init__(self):
        super().__init__()
        self.names, self.records = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        shown = tree_map(lambda x: tuple(x.shape) if isinstance(x, torch.Tensor) else x, (args, kwargs or {}))
        self.names.append(str(function))
        self.records.append(f"{function} {shown}")
        return result


@pytest.mark.parametrize("given", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}], ids=str)
@pytest.mark.parametrize("prompts", [PROMPTS, [x[:1] * 5 for x in PROMPTS], [x[:1] for x in PROMPTS]], ids=len)
def test_fixed_shapes_sample_the_same(given, prompts, monkeypatch):
    """The form that a graph replays: the same tokens and probabilities, and no operation depends on the step."""
    model = tiny_llama(initializer_range=0.3)
    settings = config(max_new_tokens=24, eos_token_id=[256, *range(0, 256, 9)], **given)
    seeds, seen, operations = seeds_of(8), {}, []
    draw, sample_here = GrowingToken.draw, FixedToken.sample_here

    def watched(token, *args):
        tokens = draw(token, *args)
        for place, row, chosen in zip(token.rows.places, token.scores.log_softmax(dim=-1), tokens, strict=True):
            seen.setdefault((type(token), int(place)), []).append(float(row[chosen]))
        return tokens

    def recorded(token):
        with Operations() as record:
            sample_here(token)
        operations.append((len(token.rows.ended), record))

    monkeypatch.setattr(GrowingToken, "draw", watched)
    growing = generate_groups(model, prompts, seeds, settings)
    monkeypatch.setattr(sampling_loop, "replays", lambda device: True)
    assert generate_groups(model, prompts, seeds, settings) == growing
    for place in range(32):
        one, other = seen[GrowingToken, place], seen[FixedToken, place]
        number = min(len(one), len(other))  # rows leave at different times
        assert one[:number] == pytest.approx(other[:number], abs=1e-5)
    monkeypatch.setattr(GrowingToken, "draw", draw)
    monkeypatch.setattr(FixedToken, "sample_here", recorded)
    generate_groups(model, prompts, seeds, settings)
    del operations[0]  # which makes the room of prompts of one token
    assert len({rows for rows, _ in operations}) > 2  # rows leave
    for (rows, one), (others, other) in pairwise(operations):
        assert rows != others or one.records == other.records
    # transformers' processors fill with constants of the host, which is no wait for a GPU
    waits = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.lift_fresh.default"}
    assert "top_k" in given or waits.isdisjoint(name for _, record in operations for name in record.names)


@pytest.mark.parametrize("form", ["growing", "fixed", "other loop"])
def test_completions_have_their_log_probabilities(form, monkeypatch):
    """Those of the distribution from which they are drawn, also if rows leave."""
    monkeypatch.setattr(sampling_loop, "replays", lambda device: form == "fixed")
    model, other = tiny_llama(initializer_range=0.3), {"no_repeat_ngram_size": 20} if form == "other loop" else {}
    settings = config(max_new_tokens=24, temperature=0.7, eos_token_id=[256, *range(0, 256, 9)], **other)
    groups = generate_groups(model, PROMPTS, seeds_of(8), settings)
    for prompt, ids in ((prompt, ids) for prompt, group in zip(PROMPTS, groups, strict=True) for ids in group):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)
        assert ids.logps == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [False, True])
def test_graphs_sample_the_same(autocast, monkeypatch):
    model, captured = tiny_llama(initializer_range=0.3).cuda(), []
    settings = config(max_new_tokens=120, temperature=0.8, top_p=0.9, eos_token_id=[256, 0, 1, 2])
    capture = FixedToken.capture
    monkeypatch.setattr(FixedToken, "capture", lambda token: capture(token) or captured.append(token.graph))
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        replayed = [generate_groups(model, PROMPTS, seeds_of(8), settings) for _ in range(2)]
        assert None not in captured and len(captured) > 2  # rows leave
        assert replayed[0] == replayed[1]
        monkeypatch.setattr(FixedToken, "capture", lambda token: None)
        assert generate_groups(model, PROMPTS, seeds_of(8), settings) == replayed[0]
        monkeypatch.setattr(sampling_loop, "replays", lambda device: False)
        growing = generate_groups(model, PROMPTS, seeds_of(8), settings)
    same = [a == b for one, other in zip(growing, replayed[0], strict=True) for a, b in zip(one, other, strict=True)]
    assert autocast or sum(same) >= 30  # of 32: rounding may change a token, and all that follow


def test_a_cache_layer_has_room():
    """Under autocast, where keys and values come in different data types, they are held in that of attention."""
    layer = RoomyLayer(5)
    keys, values = torch.randn(3, 2, 4, 8).bfloat16().float(), torch.randn(3, 2, 4, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        for k in range(0, 4, 2):
            held = layer.update(keys[:, :, k : k + 2], values[:, :, k : k + 2])
    assert held[0].equal(keys.bfloat16()) and held[1].equal(values)
    room = layer.rooms[0]
    layer.keep(2, torch.tensor([1]), torch.tensor([2]))
    assert layer.keys.equal(keys[[0, 2]].bfloat16()) and layer.values.equal(values[[0, 2]])
    assert layer.rooms[0].data_ptr() == room.data_ptr()  # no other memory
    held = layer.update(keys[:2, :, :1], values[:2, :, :1])
    assert held[0].shape == (2, 2, 5, 8) and held[0][:, :, :4].equal(keys[[0, 2]].bfloat16())


def test_fixed_shapes_under_autocast(monkeypatch):
    model, settings = tiny_llama(initializer_range=0.3), config(max_new_tokens=3)
    with torch.autocast("cpu", torch.bfloat16):
        growing = generate_groups(model, PROMPTS, seeds_of(4), settings)
        monkeypatch.setattr(sampling_loop, "replays", lambda device: True)
        fixed = generate_groups(model, PROMPTS, seeds_of(4), settings)
    same = [a == b for one, other in zip(growing, fixed, strict=True) for a, b in zip(one, other, strict=True)]
    assert sum(same) >= 12  # of 16: rounding may change a token, and all that follow


def test_autocast_changes_no_data_type_of_what_is_sampled():
    """A model in float32 under bfloat16 autocast samples what a forward under autocast gives."""
    model = tiny_llama(initializer_range=0.3)
    with torch.autocast("cpu", torch.bfloat16):
        groups = generate_groups(model, PROMPTS, [[0]] * 4, GREEDY)
        for prompt, (ids,) in zip(PROMPTS, groups, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
            chosen = logits.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            assert (logits.max(dim=1).values - chosen).max() < 0.1


def test_a_number_chooses_by_the_cumulative_probability():
    """1.0 included, and never a token without probability."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -torch.inf]])
    numbers = torch.linspace(0, 1, 2001)[:, None]  # as random numbers of many rows, 1.0 included
    chosen = sampling_loop.SamplingLoop.choose(logits.expand(2001, -1), numbers)
    shares = torch.bincount(chosen, minlength=4) / 2001
    assert torch.allclose(shares, logits.softmax(dim=-1)[0], atol=1e-3) and shares[3] == 0


@pytest.mark.parametrize("pad", [257, 256])
def test_stop_strings_end_completions(pad):
    """
    A completion is that without stop strings, up to the token that completes one. The padding behind it is no end of
    sequence.
    """
    model, tokenizer = tiny_llama(initializer_range=0.2), byte_tokenizer()
    settings = config(max_new_tokens=12, pad_token_id=pad)
    seeds = seeds_of(40)
    whole = generate_groups(model, PROMPTS, seeds, settings)
    pairs = Counter(pair for group in whole for ids in group for pair in pairwise(ids[:-1]) if max(pair) < 94)
    pair = max(pairs, key=pairs.get)  # letters
    singles = Counter(token for group in whole for ids in group for token in ids if token < 94).most_common(5)
    strings = [tokenizer.decode(pair), *(tokenizer.decode([token]) for token, _ in singles if token not in pair)]
    agents, without = (Agents([settings.eos_token_id], [(tokenizer, stops)]) for stops in (strings, []))
    stopped = generate_groups(model, PROMPTS, seeds, settings, agents=agents)
    split = generate_groups(model, PROMPTS, seeds, settings, token_budget=64, agents=agents)

    def cut(ids):
        texts = [tokenizer.decode(ids[: k + 1], skip_special_tokens=True) for k in range(len(ids))]
        return ids[: 1 + next((k for k, text in enumerate(texts) if any(x in text for x in strings)), len(ids))]

    assert stopped == split == [[cut(ids) for ids in group] for group in whole]
    lengths = Counter(len(ids) for group in stopped for ids in group)
    assert lengths[12] > 40 and sum(lengths.values()) - lengths[12] > 40 and len(lengths) > 8
    assert generate_groups(model, PROMPTS, seeds, settings, agents=without) == whole


def test_stop_strings_are_not_found_in_the_prompt():
    model, tokenizer = tiny_llama(), byte_tokenizer()
    (((first, *_),),) = generate_groups(model, [[65, 66]], [[0]], GREEDY)
    agents = Agents([GREEDY.eos_token_id], [(tokenizer, [tokenizer.decode([66, first]), "AB"])])
    ((ids,),) = generate_groups(model, [[65, 66]], [[0]], GREEDY, agents=agents)
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


def test_the_settings_of_a_model_do_not_apply():
    """A `generation_config.json` may have any: what the caller leaves out is off."""
    model, settings = tiny_llama(initializer_range=0.3), config(max_new_tokens=8)
    expected = generate_groups(model, PROMPTS, seeds_of(4), settings)
    own = model.generation_config
    own.min_p, own.no_repeat_ngram_size, own.num_beams = 0.9, 1, 3
    assert generate_groups(model, PROMPTS, seeds_of(4), settings) == expected
    assert model.generation_config is own


def test_logits_that_are_no_numbers_are_an_error():
    model = tiny_llama()
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits of the model are not numbers"):
        generate_groups(model, PROMPTS, seeds_of(2), config(max_new_tokens=4))


def test_a_text_beyond_learned_positions_is_refused(tmp_path, capsys):
    """Nothing is scored. Computed positions, as in Llama, set no limit, and it is told once that they were left."""
    roles, text = ("aux", "main"), "p" * 249
    environment = FunctionEnvironment(dict.fromkeys(roles, "{x}"), count_reward)
    tokenizers = {role: byte_tokenizer() for role in roles}
    limited = AgentTeam({"aux": tiny_llama(), "main": other_model("gpt2")}, tokenizers)
    with pytest.raises(
        TooLongError, match=r"A prompt of 'main' with its completion may have 257 tokens, but .* only 256"
    ):
        limited.collaborate({"x": text}, environment, max_new_tokens=8)
    (turn,) = limited.collaborate({"x": text}, environment, max_new_tokens=7)
    assert turn.prompts["main"] == text
    rope = tiny_llama(max_position_embeddings=64)
    for _ in range(2):
        AgentTeam({"aux": rope, "main": rope}, tokenizers).collaborate({"x": text}, environment, max_new_tokens=8)
    told = "A prompt of 'main' with its completion has more tokens than the 64 positions (`max_position_embeddings`)"
    assert capsys.readouterr().err.count(told) == 1
    check_length("A text", other_model("gemma3"), 10**6)
    rows = pairs(roles, 4).to_list()
    rows[3]["main_rejected"] = "r" * 400
    with pytest.raises(TooLongError, match=r"Row 3 of `train_dataset`: .* of 'main' may have 4\d\d tokens"):
        pair_trainer(tmp_path, limited, train_dataset=Dataset.from_list(rows))
    settings = {"vocab_size": 258, "n_positions": 256, "n_embd": 32, "n_layer": 1, "n_head": 2, "num_labels": 1}
    reward = RewardModel(GPT2ForSequenceClassification(GPT2Config(**settings)), byte_tokenizer())
    with pytest.raises(TooLongError, match="A text of the reward model"):
        reward(["a"], ["b" * 300])

"""
Packed rows: what is computed once, and that log-probabilities and gradients are those of every sequence on its own.
"""

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from trl_multiagent.models.packing import MAX_ROW_LENGTH, can_pack, divide, mask_of, pack
from trl_multiagent.rollout.tree import Samples
from trl_multiagent.team.agent_team import run_agent
from trl_multiagent.trainers.base.batch import Row, agent_tensors, forward_inputs

from by_hand import log_probability
from tiny import other_model, tiny_experts, tiny_llama


EOS, PAD = 256, 257


def rows_of(*nodes):
    return [
        Row(0, {"solo": Samples(prompt, completions, [""] * len(completions))}, g, {"solo": 1.0 + g})
        for prompt, completions in nodes
        for g in range(len(completions))
    ]


def by_itself(model, row):
    samples = row.samples["solo"]
    return log_probability(model, samples.prompt_ids, samples.completion_ids[row.sibling])


ROOT = [5, 6, 7, 8]
TREES = {
    # Two siblings are equal, two begin alike, one has one token. 3 tokens of the prompt are shared; its last one is
    # followed by 3 different ones
    "siblings": (rows_of((ROOT, [[20, 21, 22], [20, 21, 22], [20, 23], [EOS], [30, 31, 32, 33]])), 3 + 3 + 1 + 1 + 4),
    # The prompts of the second turn continue a completion with and without its end, and one that is tokenized anew
    # from its second token on
    "turns": (
        rows_of(
            (ROOT, [[20, 21, EOS], [22, 23, 24]]),
            ([*ROOT, 20, 21, EOS, 40, 41], [[50, 51], [52, EOS]]),
            ([*ROOT, 22, 60, 61, 41], [[50, EOS]]),
        ),
        3 + (3 + 2 + 2 + 2) + (3 + 5),
    ),
    # Nothing in common but the first token, which is followed by another one in each
    "prompts of one token": (rows_of(([5], [[1, 2, 3, EOS], [3, EOS]]), ([6], [[1, EOS]])), 4 + 2 + 2),
}
MODELS = {
    "sdpa": tiny_llama,
    "eager": lambda: tiny_llama(attn_implementation="eager"),
    "grouped queries": lambda: tiny_llama(num_key_value_heads=1),
    "learned positions": lambda: other_model("gpt2"),
    "a wide window": lambda: other_model("mistral with a sliding window", sliding_window=64),
    "experts": lambda: tiny_experts("qwen3_moe"),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_rows_compute_what_they_have_in_common_once(name, tree, checkpointing):
    model, (rows, num_tokens) = MODELS[name](), TREES[tree]
    expected = [by_itself(model, row) for row in rows]
    sum(row.advantages["solo"] * x.sum() for row, x in zip(rows, expected, strict=True)).backward()
    gradients = {key: x.grad.clone() for key, x in model.named_parameters()}

    model.zero_grad()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if checkpointing:
        model.train().activation_checkpointing_enable()
    tensors = agent_tensors(rows, "solo", PAD, [EOS])
    inputs = forward_inputs(model, tensors)
    assert (inputs["readers"][..., 0] >= 0).sum() == num_tokens
    outputs = run_agent(model, None, **inputs)
    assert outputs.log_probs.shape == outputs.entropy.shape == tensors.completion_ids.shape
    for found, of_row in zip(outputs.log_probs, expected, strict=True):
        assert torch.allclose(found[: len(of_row)], of_row, atol=1e-5) and not found[len(of_row) :].any()
    (outputs.log_probs.sum(dim=1) * tensors.advantages).sum().backward()
    for key, x in model.named_parameters():
        assert torch.allclose(x.grad, gradients[key], atol=1e-4), key


def test_a_mask_is_not_copied():
    """Attention on a GPU copies masks whose rows do not begin at multiples of 8 numbers."""
    packed = pack([[*ROOT, 20, 21], [*ROOT, 22, 23]], [4, 4], 2, 32)
    mask = mask_of(packed["readers"], packed["position_ids"], torch.float32)
    assert mask.size(-1) % 8 != 0 and all(stride % 8 == 0 for stride in mask.stride()[:-1])


def test_masked_completions_cost_nothing():
    rows = rows_of((ROOT, [[20, 21, EOS], [30, 31, 32]]), ([9] * 8, [[33]]))
    tensors = agent_tensors(rows, "solo", PAD, [EOS], mask_truncated=True)
    packed = pack(tensors.sequences, [4, 4, 8], 3, hidden_size=32)
    assert packed["input_ids"].tolist() == [[*ROOT, 20, 21]]
    assert packed["predicting"].tolist() == [0, 3, 4, 5]  # the first place stands for padding
    assert packed["shift_labels"].tolist() == [[-100, 20, 21, EOS]]
    assert packed["places"].tolist() == [[1, 2, 3], [-1] * 3, [-1] * 3]
    nothing = pack(tensors.sequences[1:], [4, 8], 3, hidden_size=32)
    assert nothing["input_ids"].tolist() == [[0]] and (nothing["places"] == -1).all()


def test_rows_are_divided_at_the_least_cost():
    # Four siblings of 100 tokens, 90 of them a prompt, of each of two items
    lengths, shared = [100] * 8, [0, 90, 90, 90] * 2
    assert divide(lengths, shared, hidden_size=4096) == [0, 4]
    # Without a common prompt, each sequence has a row of its own: attention to others would be wasted
    assert divide([100] * 4, [0] * 4, hidden_size=64) == [0, 1, 2, 3]
    # Short sequences fill a row that another one makes as long
    assert divide([100, 50, 50], [0] * 3, hidden_size=64) == [0, 1]
    # No row of several sequences is longer than the limit
    assert divide([4000] * 3, [0, 2000, 3990], hidden_size=10**6) == [0, 1]


@pytest.mark.parametrize(
    ("build", "packs"),
    [
        (lambda: other_model("gemma3"), False),  # its windows are shorter
        (lambda: other_model("mistral with a sliding window"), False),
        (lambda: other_model("bloom"), False),  # takes no positions
        (lambda: other_model("falcon"), False),  # computes ALiBi from a mask of two dimensions
        (tiny_llama, True),
    ],
)
def test_models_that_need_rows_of_their_own(build, packs):
    model = build().eval()
    assert can_pack(model, longest=20) == packs
    tensors = agent_tensors(TREES["turns"][0], "solo", PAD, [EOS])
    expected = [by_itself(model, row) for row in TREES["turns"][0]]
    add_fused_lm_head(model)
    inputs = forward_inputs(model, tensors)
    assert ("readers" in inputs) == packs
    # The head sees no prompt but its last token, and the place that stands for padding
    assert len(inputs["predicting"]) <= 1 + tensors.completion_mask.sum()
    for found, x in zip(run_agent(model, None, **inputs).log_probs, expected, strict=True):
        assert torch.allclose(found[: len(x)], x, atol=1e-5) and not found[len(x) :].any()


def test_what_saves_nothing_is_not_packed():
    assert pack([[1, 2, 3, 4], [5, 6, 7, 8]], [2, 2], 2, hidden_size=32) is None
    assert not can_pack(tiny_llama(), MAX_ROW_LENGTH + 1) and can_pack(tiny_llama(), MAX_ROW_LENGTH)
    for model in (tiny_llama(attn_implementation="flex_attention"), other_model("recurrent layers")):
        assert not can_pack(model, longest=20)

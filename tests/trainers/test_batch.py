"""Rows and their tensors, computed from trees that are defined here by hand."""

from dataclasses import dataclass

import torch

from trl_multiagent.rollout.tree import Node, Samples
from trl_multiagent.trainers.base.batch import AgentTensors, Batch, CriticTensors, agent_tensors, collect_rows


PAD, EOS = 0, 9


def node(prompt, *completions, logps=None):
    samples = Samples(prompt, list(completions), ["" for _ in completions], logps)
    return Node({}, (), {"solo": ""}, {"solo": samples})


LEVELS = [[node([1, 2, 3], [4, 5, 9], [6, 9])], [node([1], [7], [8, 9])]]
ADVANTAGES = [[{"solo": torch.tensor([0.5, -0.5])}], [{"solo": torch.tensor([0.0, 2.0])}]]


def tensors(rows, num_rows=4, **settings):
    return agent_tensors(rows, "solo", num_rows, PAD, [EOS], **settings)


def test_rows_are_sorted_by_length_and_siblings_stay_together():
    rows = collect_rows(LEVELS, ADVANTAGES)
    assert [(row.turn, row.sibling, row.advantages["solo"]) for row in rows] == [
        (1, 0, 0.0),
        (1, 1, 2.0),
        (0, 0, 0.5),
        (0, 1, -0.5),
    ]
    assert [row.num_tokens("solo") for row in rows] == [1, 2, 3, 2]


def test_tensors_are_padded_on_both_sides_and_filled_up_with_padding_rows():
    batch = tensors(collect_rows(LEVELS, ADVANTAGES), num_rows=5)
    assert batch.prompt_ids.tolist() == [[0, 0, 1], [0, 0, 1], [1, 2, 3], [1, 2, 3], [0, 0, 0]]
    assert batch.prompt_mask.tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1], [0, 0, 1]]
    assert batch.completion_ids.tolist() == [[7, 0, 0], [8, 9, 0], [4, 5, 9], [6, 9, 0], [0, 0, 0]]
    assert batch.completion_mask.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]]
    assert batch.advantages.tolist() == [0.0, 2.0, 0.5, -0.5, 0.0]
    assert batch.turns.tolist() == [1, 1, 0, 0, 0]


def test_truncated_completions_can_be_masked():
    batch = tensors(collect_rows(LEVELS, ADVANTAGES), mask_truncated=True)
    assert batch.completion_mask.tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]


def test_sampling_log_probabilities_are_padded_with_zeros():
    levels = [[node([1], [7], [8, 9], logps=[[-1.0], [-2.0, -3.0]])]]
    advantages = [[{"solo": torch.tensor([1.0, 2.0])}]]
    batch = tensors(collect_rows(levels, advantages), num_rows=3, sampling_logps=True)
    assert batch.sampling_logps.tolist() == [[-1.0, 0.0], [-2.0, -3.0], [0.0, 0.0]]


@dataclass
class WithValues(AgentTensors):
    values: torch.Tensor | None = None
    prompt_values: torch.Tensor | None = None


def test_trimming_covers_columns_that_an_algorithm_adds():
    batch = tensors(collect_rows(LEVELS, ADVANTAGES))
    batch.advantages = batch.advantages.unsqueeze(1).expand(4, 3)  # one per token
    numbers = torch.arange(12.0).view(4, 3)
    trimmed = WithValues(**vars(batch), values=numbers, prompt_values=numbers)[:2].trimmed()
    assert {name: tuple(x.shape) for name, x in vars(trimmed).items() if isinstance(x, torch.Tensor)} == {
        "prompt_ids": (2, 1),
        "prompt_mask": (2, 1),
        "prompt_values": (2, 1),
        "completion_ids": (2, 2),
        "completion_mask": (2, 2),
        "values": (2, 2),
        "advantages": (2, 2),
        "turns": (2,),
    }
    assert trimmed.prompt_values.tolist() == [[2.0], [5.0]]


def test_a_batch_is_split_into_micro_batches():
    """Agents and critics may have different numbers of rows."""
    rows = tensors(collect_rows(LEVELS, ADVANTAGES))
    rows.weight = 0.5
    critic = CriticTensors(*(torch.arange(6).view(6, 1) + 10 * k for k in range(5)))
    first, second = Batch({"solo": rows}, {"central": critic}).micro_batches(2)
    assert first.agents["solo"].turns.tolist() == [1, 1] and second.agents["solo"].turns.tolist() == [0, 0]
    assert second.agents["solo"].weight == 0.5 and second.agents["solo"].old_logps is None
    assert second.critics["central"].targets.tolist() == [[23], [24], [25]]
    assert rows.of_turn(0).completion_mask.sum(dim=1).tolist() == [0, 0, 3, 2]

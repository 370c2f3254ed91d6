"""Rows and their tensors, computed from trees that are defined here by hand."""

import pytest
import torch

from trl_multiagent.rollout.tree import Node, Samples
from trl_multiagent.trainers.base.batch import Row, agent_tensors, collect_rows, split_rows


PAD, EOS = 0, 9


def node(prompt, *completions, logps=None, turn=0):
    samples = Samples(prompt, list(completions), ["" for _ in completions], logps)
    return Node({}, (None,) * turn, {"solo": ""}, {"solo": samples})


TURNS = [[node([1, 2, 3], [4, 5, 9], [6, 9])], [node([1], [7], [8, 9], turn=1)]]
ADVANTAGES = [[{"solo": torch.tensor([0.5, -0.5])}], [{"solo": torch.tensor([0.0, 2.0])}]]


def tensors(rows, **settings):
    return agent_tensors(rows, "solo", PAD, [EOS], **settings)


def test_rows_are_sorted_by_length_and_siblings_stay_together():
    rows = collect_rows(TURNS, ADVANTAGES)
    found = [(row.turn, row.sibling, row.advantages["solo"]) for row in rows]
    assert found == [(1, 0, 0.0), (1, 1, 2.0), (0, 0, 0.5), (0, 1, -0.5)]
    assert [len(row.trained_ids("solo", [EOS], mask_truncated=False)) for row in rows] == [1, 2, 3, 2]
    assert [list(map(len, split_rows(rows, 2, size))) for size in (2, 3)] == [[2, 2], [2, 2]]


def test_tensors_are_padded_on_both_sides():
    batch = tensors(collect_rows(TURNS, ADVANTAGES))
    assert batch.prompt_ids.tolist() == [[0, 0, 1], [0, 0, 1], [1, 2, 3], [1, 2, 3]]
    assert batch.prompt_mask.tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1]]
    assert batch.completion_ids.tolist() == [[7, 0, 0], [8, 9, 0], [4, 5, 9], [6, 9, 0]]
    assert batch.completion_mask.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]
    assert batch.advantages.tolist() == [0.0, 2.0, 0.5, -0.5]
    assert batch.turns.tolist() == [1, 1, 0, 0]
    assert batch.of_turn(0).completion_mask.sum(dim=1).tolist() == [0, 0, 3, 2]


def test_no_rows_are_a_row_of_padding():
    batch = tensors([], sampling_logps=True)
    assert batch.prompt_ids.tolist() == batch.completion_ids.tolist() == [[PAD]]
    assert batch.completion_mask.tolist() == [[0]] and batch.sampling_logps.tolist() == [[0.0]]


def test_truncated_completions_can_be_masked():
    batch = tensors(collect_rows(TURNS, ADVANTAGES), mask_truncated=True)
    assert batch.completion_mask.tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]
    (masked,) = tensors(collect_rows(TURNS, ADVANTAGES)[:1], mask_truncated=True).completion_ids.tolist()
    assert masked == [PAD]  # it costs nothing


def test_sampling_log_probabilities_are_padded_with_zeros():
    turns = [[node([1], [7], [8, 9], logps=[[-1.0], [-2.0, -3.0]])]]
    advantages = [[{"solo": torch.tensor([1.0, 2.0])}]]
    batch = tensors(collect_rows(turns, advantages), sampling_logps=True)
    assert batch.sampling_logps.tolist() == [[-1.0, 0.0], [-2.0, -3.0]]


@pytest.mark.parametrize(
    ("nodes", "number", "size", "expected"),
    [
        ([4, 4], 2, 4, [4, 4]),
        ([4, 4, 4], 2, 9, [8, 4]),  # the second node ends where a part is not full
        ([3, 3, 3], 2, 5, [5, 4]),  # there is no room for whole nodes in both parts
        ([2], 3, 4, [2, 0, 0]),
        ([6], 2, 4, [4, 2]),
        ([], 2, 4, [0, 0]),
    ],
)
def test_parts_are_filled_with_whole_nodes(nodes, number, size, expected):
    rows = [Row(0, samples, k, {}) for n, samples in ((n, {}) for n in nodes) for k in range(n)]
    parts = split_rows(rows, number, size)
    assert [len(part) for part in parts] == expected and [row for part in parts for row in part] == rows

"""Rows and their tensors, computed from trees that are defined here by hand."""

import torch

from trl_multiagent.rollout.tree import Node, Samples
from trl_multiagent.trainers.base.rows import agent_tensors, collect_rows, join_agents, tensors_of_agent, trim_padding


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
    assert batch["prompt_ids"].tolist() == [[0, 0, 1], [0, 0, 1], [1, 2, 3], [1, 2, 3], [0, 0, 0]]
    assert batch["prompt_mask"].tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1], [0, 1, 1]]
    assert batch["completion_ids"].tolist() == [[7, 0, 0], [8, 9, 0], [4, 5, 9], [6, 9, 0], [0, 0, 0]]
    assert batch["completion_mask"].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]]
    assert batch["advantages"].tolist() == [0.0, 2.0, 0.5, -0.5, 0.0]
    assert batch["turns"].tolist() == [1, 1, 0, 0, 0]


def test_truncated_completions_can_be_masked():
    batch = tensors(collect_rows(LEVELS, ADVANTAGES), mask_truncated=True)
    assert batch["completion_mask"].tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]


def test_sampling_log_probabilities_are_padded_with_zeros():
    levels = [[node([1], [7], [8, 9], logps=[[-1.0], [-2.0, -3.0]])]]
    advantages = [[{"solo": torch.tensor([1.0, 2.0])}]]
    batch = tensors(collect_rows(levels, advantages), num_rows=3, sampling_logps=True)
    assert batch["sampling_per_token_logps"].tolist() == [[-1.0, 0.0], [-2.0, -3.0], [0.0, 0.0]]


def test_trimming_covers_columns_that_an_algorithm_adds():
    batch = tensors(collect_rows(LEVELS, ADVANTAGES))
    batch |= {"values": torch.arange(12.0).view(4, 3), "prompt_values": torch.arange(12.0).view(4, 3)}
    batch["advantages"] = batch["advantages"].unsqueeze(1).expand(4, 3)  # one per token
    trimmed = trim_padding({name: x[:2] for name, x in batch.items()})
    assert {name: tuple(x.shape) for name, x in trimmed.items()} == {
        "prompt_ids": (2, 1),
        "prompt_mask": (2, 1),
        "prompt_values": (2, 1),
        "completion_ids": (2, 2),
        "completion_mask": (2, 2),
        "values": (2, 2),
        "advantages": (2, 2),
        "turns": (2,),
    }
    assert trimmed["prompt_values"].tolist() == [[2.0], [5.0]]


def test_agents_are_joined_in_one_batch_and_separated_again():
    batch = join_agents({"aux": {"x": torch.tensor(1)}, "main": {"x": torch.tensor(2)}})
    assert batch == {"aux/x": torch.tensor(1), "main/x": torch.tensor(2)}
    assert tensors_of_agent(batch, "main") == {"x": torch.tensor(2)}

"""What an update and a token launch, counted on a CPU, and that fewer launches compute the same."""

import functools
from unittest import mock

import pytest
import torch

from benchmarks.engine.launches import Launches, autocast, make_team, token, update
from trl_multiagent.team.adapters import AgentAdapters

from forwards import gradients, inputs_of


@functools.cache
def launches(form: str, num_agents: int, layers: int) -> int:
    (number,) = update(make_team(form, num_agents, layers), 32, 32, checkpointing=False)
    return number


def at_24_layers(form: str, num_agents: int) -> int:
    one, two = (launches(form, num_agents, layers) for layers in (1, 2))
    return one + 23 * (two - one)


def test_an_update():
    """Agents on one base cost hardly more than one."""
    assert at_24_layers("lora", 2) <= 5900
    assert at_24_layers("full", 2) <= 7510
    assert at_24_layers("lora", 4) <= 1.3 * at_24_layers("lora", 1)


def test_a_token():
    """Two agents launch less than one, whose adapter PEFT adds."""
    assert token(make_team("lora", 2, 4)) <= 290
    assert token(make_team("lora", 1, 4)) <= 320


def test_adapters_without_casts():
    """An input in bfloat16 is not cast to the type of an adapter and back, which changes nothing."""
    choose = AgentAdapters.choose
    inputs = inputs_of(make_team("lora", 1, 1), {"agent_0": [[5, 6, 7, 8]]})

    def count() -> tuple[int, list[torch.Tensor]]:
        team = make_team("lora", 1, 1)
        with Launches() as found, autocast():
            computed = gradients(team, inputs)
        return found.number, computed

    fewer, found = count()
    with mock.patch.object(AgentAdapters, "choose", lambda *arguments: choose(*arguments[:4])):
        number, expected = count()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert fewer <= number - 2 * 7  # of 7 layers, forward and backward


@pytest.mark.parametrize("num_agents", [1, 2])
def test_adapters_are_chosen_where_they_change(num_agents):
    """With recomputed layers, too: twice as many layers are set for twice the depth."""
    chosen = {}
    for layers in (2, 4):
        find = AgentAdapters.layers_in
        with mock.patch.object(AgentAdapters, "layers_in", autospec=True, side_effect=find) as spy:
            team = make_team("lora", num_agents, layers)
            spy.reset_mock()
            with autocast():
                gradients(team, inputs_of(team, {role: [[5, 6, 7, 8]] for role in team.roles}), use_reentrant=False)
            chosen[layers] = sum(len(find(*call.args)) for call in spy.call_args_list)
    assert 0 < chosen[4] == 2 * chosen[2]

"""Agents on one base sample together what they sample alone."""

from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import OPTConfig, OPTForCausalLM

from trl_multiagent import AgentTeam
from trl_multiagent.rollout.sampler import TransformersGenerator, TurnPrompts
from trl_multiagent.rollout.sampling_arguments import sampling_arguments
from trl_multiagent.rollout.tree import Node
from trl_multiagent.team import agent_team

from forwards import gradients, inputs_of
from tiny import byte_tokenizer, team_of, tiny_experts, tiny_llama


ROLES = ("aux", "main", "checker")


def adapted(*configs, base=None):
    """A team with an adapter of each configuration on one base."""
    base = tiny_llama() if base is None else base
    for k, config in enumerate(configs):
        torch.manual_seed(k)
        config = LoraConfig(
            **{"r": 4, "lora_alpha": 16, "init_lora_weights": False, "target_modules": "all-linear"} | config
        )
        if k == 0:
            base = get_peft_model(base, config, adapter_name=ROLES[0])
        else:
            base.add_adapter(ROLES[k], config)
    roles = ROLES[: len(configs)]
    return AgentTeam(dict.fromkeys(roles, base), {role: byte_tokenizer() for role in roles})


def opt():
    torch.manual_seed(0)
    size = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.0}
    return OPTForCausalLM(OPTConfig(vocab_size=258, max_position_embeddings=64, word_embed_proj_dim=16, **size))


ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
TOKENS = {"trainable_token_indices": [65]}
# Each with the number of its calls
TEAMS = {
    "two agents": (lambda: adapted({}, {}), 1),
    "other ranks and layers": (lambda: adapted({}, {"r": 7, "use_rslora": True}, {"target_modules": ["v_proj"]}), 1),
    "biases": (lambda: adapted({"lora_bias": True}, {}), 2),
    "rows and tokens in one dimension": (lambda: adapted({}, {}, base=opt()), 1),
    "two bases": (lambda: team_of("lora on two bases", ROLES), 2),
    "shared": (lambda: team_of("shared", ROLES), 1),
    "with DoRA": (lambda: adapted({}, {"use_dora": True}, {}), 2),
    "with a copied module": (lambda: adapted({"modules_to_save": ["norm"]}, {}, {}), 2),
    "with tokens of their own": (lambda: adapted(TOKENS, TOKENS, base=tiny_llama(tie_word_embeddings=False)), 2),
    "beside experts": (lambda: adapted(ATTENTION, ATTENTION, base=tiny_experts("qwen3_moe")), 1),
    "in experts": (lambda: adapted({}, {}, base=tiny_experts("qwen3_moe")), 2),
    "in a shared expert": (lambda: adapted({}, {}, base=tiny_experts("qwen2_moe")), 2),
    "with embeddings": (lambda: adapted({}, {}, {"target_modules": ["embed_tokens", "q_proj"]}), 2),
}


ALIKE = {role: [[*range(65, 77), *rest] for rest in ([k], [k, 72])] for k, role in enumerate(ROLES, 78)}
PROMPTS = {"aux": [[65, 66, 67], [68]], "main": [[65, 66, 67], [70, 71]], "checker": [[72, 73], [74, 75, 76, 77]]}


def assert_same(one, other):
    """The same tokens, sampled with the same log-probabilities."""
    assert one == other
    for role in one:
        for x, y in zip(one[role], other[role], strict=True):
            for a, b in ((torch.tensor(ids.logps) for ids in pair) for pair in zip(x, y, strict=True)):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-4, equal_nan=True)


SAMPLING = {
    "greedy": ({"do_sample": False}, None, 1),
    "temperature": ({"temperature": 2.0}, None, 1),
    "several calls": ({"max_new_tokens": 8}, 30, 1),
    "other loop": ({"typical_p": 0.9}, None, 1),
    "prompts alike": ({"temperature": 2.0}, None, 1),
    "much padding": ({"max_new_tokens": 1}, None, 3),
    "beams": ({"num_beams": 2, "do_sample": False}, None, 3),
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("other ranks and layers", x) for x in SAMPLING),
        *((x, "temperature") for x in ("two bases", "shared", "with DoRA")),
    ],
)
def test_completions(name, settings):
    """The same as of each agent alone, with end tokens and stop strings of its own."""
    arguments, budget, num_calls = SAMPLING[settings]
    team = TEAMS[name][0]()
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "A"
    team.tokenizers["main"] = tokenizer
    stops = {} if settings == "beams" else {"aux": ["B"], "checker": ["CD", "E"]}
    arguments = sampling_arguments({"max_new_tokens": 24, **arguments})
    generator = TransformersGenerator(team, arguments, budget, stops, seed=3)
    nodes = {role: [Node({}, (), {}, tree=k) for k in range(2)] for role in team.roles}
    num_generations = 1 if num_calls == 3 else 20 if settings == "temperature" else 5
    prompts = ALIKE if settings == "prompts alike" else PROMPTS
    turn = TurnPrompts(nodes, {role: prompts[role] for role in team.roles}, num_generations)
    joint = generator.generate(turn)
    assert len(generator.calls(turn)) == (num_calls if num_calls == 3 else TEAMS[name][1])
    with mock.patch.object(generator, "calls", lambda turn: [[role] for role in turn.prompt_ids]):
        assert_same(generator.generate(turn), joint)
    if settings == "temperature":  # completions end in every way
        texts = {role: [tokenizer.decode(ids) for completions in joint[role] for ids in completions] for role in joint}
        assert any(text.endswith("B") for text in texts["aux"]) and any(text.endswith("A") for text in texts["main"])
        assert any(text.endswith(("CD", "E")) for text in texts["checker"])


def test_references_sample():
    team = adapted({"init_lora_weights": True}, {})
    generator = TransformersGenerator(team, sampling_arguments({"do_sample": False, "max_new_tokens": 8}))
    nodes = {role: [Node({}, (), {}) for _ in range(2)] for role in team.roles}
    turn = TurnPrompts(nodes, {role: PROMPTS[role] for role in team.roles}, 1)
    initial = generator.generate(turn)
    team.keep_reference()
    for parameter in team.agent_parameters("aux") + team.agent_parameters("main"):
        parameter.data += 0.3
    assert generator.generate(turn) != initial
    with team.as_reference():
        assert_same(generator.generate(turn), initial)


ROWS = {"packed": [[65, 66, 67, 68, 69]], "padded": [[65, 66, 67], [70, 71, 72, 73]]}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", TEAMS)
def test_gradients(name, rows):
    """An update of agents on one base takes one forward, and has the gradients of each agent alone."""
    team = TEAMS[name][0]()
    inputs = inputs_of(team, dict.fromkeys(team.roles, ROWS[rows]))
    assert len(team._forwards(inputs)) == TEAMS[name][1]
    together = gradients(team, inputs)
    alone = TEAMS[name][0]()
    with mock.patch.object(alone, "_forwards", lambda inputs: [[role] for role in inputs]):
        expected = gradients(alone, inputs)
    for x, y in zip(together, expected, strict=True):
        assert torch.allclose(x, y, rtol=1e-4, atol=1e-5 * max(1.0, y.abs().max()))


@pytest.mark.parametrize("of_other", [[["aux", "main"]], [["aux"], ["main"]]])
def test_processes_of_deepspeed_make_the_same_forwards(monkeypatch, of_other):
    """ZeRO-1 and ZeRO-2 add up gradients by their order, which depends on the forwards."""
    team = TEAMS["two agents"][0]()
    inputs = inputs_of(team, dict.fromkeys(team.roles, ROWS["packed"]))
    monkeypatch.setattr(agent_team, "deepspeed_config", dict)
    monkeypatch.setattr(agent_team, "gather_object", lambda own: [*own, of_other])
    assert team._forwards(inputs) == of_other
    with torch.no_grad():  # processes make different numbers of these
        assert team._forwards(inputs) == [["aux", "main"]]

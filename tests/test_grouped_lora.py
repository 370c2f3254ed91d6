"""Agents on one base compute together what they compute alone."""

import contextlib
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import OPTConfig, OPTForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trl_multiagent import AgentTeam
from trl_multiagent.rollout.sampler import Level, TransformersGenerator, sampling_arguments
from trl_multiagent.rollout.tree import Node

from by_hand import CHECKPOINTING, distance
from tiny import byte_tokenizer, team_of, tiny_llama


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


def frozen():
    team = adapted({}, {}, {})
    team.freeze(["main"])
    return team


def opt():
    torch.manual_seed(0)
    size = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.0}
    return OPTForCausalLM(OPTConfig(vocab_size=258, max_position_embeddings=64, word_embed_proj_dim=16, **size))


TOKENS = {"trainable_token_indices": [65]}
# Each with the number of its forwards
TEAMS = {
    "two agents": (lambda: adapted({}, {}), 1),
    "other ranks and layers": (lambda: adapted({}, {"r": 7, "use_rslora": True}, {"target_modules": ["v_proj"]}), 1),
    "biases": (lambda: adapted({"lora_bias": True}, {}), 2),
    "rows and tokens in one dimension": (lambda: adapted({}, {}, base=opt()), 1),
    "two bases": (lambda: team_of("lora on two bases", ROLES), 2),
    "frozen": (frozen, 1),
    "shared": (lambda: team_of("shared", ROLES), 1),
    "with DoRA": (lambda: adapted({}, {"use_dora": True}, {}), 2),
    "with a copied module": (lambda: adapted({"modules_to_save": ["norm"]}, {}, {}), 2),
    "with tokens of their own": (lambda: adapted(TOKENS, TOKENS, base=tiny_llama(tie_word_embeddings=False)), 2),
    "with embeddings": (lambda: adapted({}, {}, {"target_modules": ["embed_tokens", "q_proj"]}), 2),
}


def rows(number, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(65, 90, (number, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    labels = ids.masked_fill(torch.arange(length) < length // 2, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "fused_lm_head": True}


@contextlib.contextmanager
def counted_forwards(team):
    count, forwards = (
        [],
        [model.base_model.register_forward_hook(lambda *_: count.append(1)) for model in team.base_models],
    )
    yield count
    for hook in forwards:
        hook.remove()


def gradients(team, outputs):
    """Of a different loss for each agent."""
    team.zero_grad()
    sum((k + 1) * outputs[role].log_probs.square().sum() for k, role in enumerate(team.trained_roles)).backward()
    return {name: x.grad.clone() for name, x in team.named_parameters() if x.requires_grad}


@pytest.mark.parametrize("name", TEAMS)
@pytest.mark.parametrize("activations", ["kept activations", "recomputed"])
def test_log_probabilities_and_gradients(name, activations):
    build, num_forwards = TEAMS[name]
    team = build()
    check(team, num_forwards, activations)


def test_reentrant_checkpoints():
    check(adapted({}, {"r": 8}), 1, "recomputed, reentrant")


def test_dropout_is_that_of_each_adapter():
    """Without dropout for the first agent, and with all but one in a million entries dropped for the second."""
    team = adapted({}, {"lora_dropout": 1 - 1e-6})
    team.uses_dropout = True
    team.train()
    for model in team.base_models:
        add_fused_lm_head(model)
    inputs = {role: rows(2, 8) for role in team.roles}
    together = team(team_inputs=inputs)
    team.eval()
    expected = team(team_inputs={"aux": inputs["aux"]})["aux"].log_probs
    assert torch.allclose(together["aux"].log_probs, expected, atol=1e-5)
    with team.policies["main"].disable_adapter():
        expected = team.agents["main"](**inputs["main"]).log_probs
    assert torch.allclose(together["main"].log_probs, expected, atol=1e-5)


def check(team, num_forwards, activations):
    for model in team.base_models:
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if CHECKPOINTING[activations]["gradient_checkpointing"]:
        team.gradient_checkpointing_enable(CHECKPOINTING[activations]["gradient_checkpointing_kwargs"])
        team.enable_input_require_grads()
    inputs = {role: rows(2 + k, 12 + k, seed=k) for k, role in enumerate(team.roles)}
    with counted_forwards(team) as count:
        together = team(team_inputs=inputs)
        assert len(count) == num_forwards
    found = gradients(team, together)
    alone = {role: team(team_inputs={role: x})[role] for role, x in inputs.items()}
    expected = gradients(team, alone)
    for role in team.roles:
        assert torch.allclose(together[role].log_probs, alone[role].log_probs, atol=1e-5)
        assert torch.allclose(together[role].entropy, alone[role].entropy, atol=1e-4)
    assert distance(found, expected) < 1e-5
    wrong = dict(zip(team.roles, reversed([*inputs.values()]), strict=True))
    assert distance(gradients(team, team(team_inputs=wrong)), expected) > 1e-2


@pytest.mark.parametrize("configs", [({}, {}), ({"init_lora_weights": True}, {})])
def test_reference_policies(configs):
    """The reference of a fresh adapter is the base alone; that of any other, a copy of the adapter."""
    team = adapted(*configs)
    for model in team.base_models:
        add_fused_lm_head(model)
    inputs = {role: rows(2, 12, seed=k) for k, role in enumerate(team.roles)}
    initial = {role: x.log_probs for role, x in team(team_inputs=inputs).items()}
    team.keep_reference()
    for parameter in team.agent_parameters("aux") + team.agent_parameters("main"):
        parameter.data += 0.1
    assert not torch.allclose(team(team_inputs=inputs)["aux"].log_probs, initial["aux"], atol=1e-3)
    with team.as_reference():
        found = team(team_inputs=inputs)
    assert all(torch.allclose(found[role].log_probs, initial[role], atol=1e-5) for role in team.roles)


@pytest.mark.parametrize(("length", "zero_3", "num_forwards"), [(16, False, 1), (24, False, 2), (24, True, 1)])
def test_rows_that_need_much_padding_are_computed_apart(length, zero_3, num_forwards):
    """12 and 16 tokens: 14 % more with padding. 12 and 24: 33 %. ZeRO-3 would gather the base twice."""
    team = adapted({}, {})
    for model in team.base_models:
        add_fused_lm_head(model)
    inputs = {"aux": rows(1, 12), "main": rows(1, length)}
    with (
        mock.patch("trl_multiagent.models.joint_rows.is_deepspeed_zero3_enabled", lambda: zero_3),
        counted_forwards(team) as count,
    ):
        team(team_inputs=inputs)
    assert len(count) == num_forwards


PROMPTS = {"aux": [[65, 66, 67], [68]], "main": [[65, 66, 67], [70, 71]], "checker": [[72, 73], [74, 75, 76, 77]]}
SAMPLING = {
    "greedy": ({"do_sample": False}, None, 1),
    "temperature": ({"temperature": 2.0}, None, 1),
    "several calls": ({}, 30, 1),
    "other loop": ({"typical_p": 0.9}, None, 1),
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
    level = Level(nodes, {role: PROMPTS[role] for role in team.roles}, num_generations)
    joint = generator.generate(level)
    assert len(generator.calls(level)) == (num_calls if num_calls == 3 else TEAMS[name][1])
    with mock.patch.object(generator, "calls", lambda level: [[role] for role in level.prompt_ids]):
        assert generator.generate(level) == joint
    if settings == "temperature":  # completions end in every way
        texts = {role: [tokenizer.decode(ids) for prompt in joint[role] for ids in prompt.ids] for role in joint}
        assert any(text.endswith("B") for text in texts["aux"]) and any(text.endswith("A") for text in texts["main"])
        assert any(text.endswith(("CD", "E")) for text in texts["checker"])


def test_references_sample():
    team = adapted({"init_lora_weights": True}, {})
    generator = TransformersGenerator(team, sampling_arguments({"do_sample": False, "max_new_tokens": 8}))
    nodes = {role: [Node({}, (), {}) for _ in range(2)] for role in team.roles}
    level = Level(nodes, {role: PROMPTS[role] for role in team.roles}, 1)
    initial = generator.generate(level)
    team.keep_reference()
    for parameter in team.agent_parameters("aux") + team.agent_parameters("main"):
        parameter.data += 0.3
    assert generator.generate(level) != initial
    with team.as_reference():
        assert generator.generate(level) == initial

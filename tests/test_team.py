import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_multiagent import AgentTeam

from tiny import byte_tokenizer, tiny_llama, tiny_team


def test_one_model_for_all_agents(tiny_model):
    team = AgentTeam.from_pretrained(tiny_model, roles=["aux", "main"])
    assert team.roles == ("aux", "main")
    left, right = (team.agents[role].model.embed_tokens.weight for role in team.roles)
    assert torch.equal(left, right) and left.data_ptr() != right.data_ptr()
    assert team.agents["aux"].config._name_or_path == tiny_model
    assert team.dtype == torch.float32
    assert team.tokenizers["aux"].padding_side == "left"


def test_a_model_for_each_agent(tiny_model, tmp_path):
    tiny_llama(hidden_size=16).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    team = AgentTeam.from_pretrained([tiny_model, str(tmp_path)], roles=["aux", "main"], dtype="bfloat16")
    assert [agent.config.hidden_size for agent in team.agents.values()] == [32, 16]
    assert {agent.dtype for agent in team.agents.values()} == {torch.bfloat16}


def test_saved_team_loads_again_and_each_agent_alone(tmp_path):
    team = tiny_team()
    team.save_pretrained(tmp_path)
    assert [agent["role"] for agent in json.loads((tmp_path / "team.json").read_text())["agents"]] == ["aux", "main"]
    loaded = AgentTeam.from_pretrained(str(tmp_path))
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in team.state_dict().items())
    for role, agent in team.agents.items():
        alone = AutoModelForCausalLM.from_pretrained(tmp_path / "agents" / role)
        assert all(torch.equal(x, alone.state_dict()[name]) for name, x in agent.state_dict().items())
        assert (
            AutoTokenizer.from_pretrained(tmp_path / "agents" / role)("é")["input_ids"]
            == byte_tokenizer()("é")["input_ids"]
        )


def test_load_weights(tmp_path):
    tiny_team().save_pretrained(tmp_path)
    other = AgentTeam({role: tiny_llama(9) for role in ("aux", "main")}, tiny_team().tokenizers)
    other.load_weights(tmp_path)
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in tiny_team().state_dict().items())
    with pytest.raises(ValueError, match=r"roles \['aux', 'main'\], this one \['solo'\]"):
        tiny_team(("solo",)).load_weights(tmp_path)


def test_a_saved_team_of_another_format(tmp_path):
    tiny_team().save_pretrained(tmp_path)
    (tmp_path / "team.json").write_text('{"format_version": 7, "agents": []}')
    with pytest.raises(ValueError, match="format version 7"):
        AgentTeam.from_pretrained(str(tmp_path))


def test_the_team_s_forward_runs_every_agent():
    team = tiny_team()
    inputs = {role: {"input_ids": torch.tensor([[65 + k, 66, 67]])} for k, role in enumerate(team.roles)}
    outputs = team(team_inputs=inputs)
    for role, agent in team.agents.items():
        assert torch.equal(outputs[role].logits, agent(**inputs[role]).logits)
    with team.activate("main"):
        assert torch.equal(team(**inputs["main"]).logits, outputs["main"].logits)
    assert team.active == "aux"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda path: AgentTeam({}, {}), "at least one agent"),
        (lambda path: AgentTeam({"a b": tiny_llama()}, {"a b": byte_tokenizer()}), "identifier"),
        (lambda path: AgentTeam({"a": tiny_llama()}, {"b": byte_tokenizer()}), r"\['a'\], the tokenizers for \['b'\]"),
        (lambda path: AgentTeam.from_pretrained(path), "pass `roles`"),
        (lambda path: AgentTeam.from_pretrained([path], roles=["a", "b"]), "1 models for the 2 roles"),
    ],
)
def test_refusals(build, message, tiny_model):
    with pytest.raises(ValueError, match=message):
        build(tiny_model)


def test_one_model_object_twice():
    model, tokenizer = tiny_llama(), byte_tokenizer()
    with pytest.raises(ValueError, match="same model object"):
        AgentTeam({"a": model, "b": model}, {"a": tokenizer, "b": tokenizer})


def test_other_roles_than_the_saved_ones(tmp_path):
    tiny_team().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has the roles \['aux', 'main'\], not \['x', 'y'\]"):
        AgentTeam.from_pretrained(str(tmp_path), roles=["x", "y"])

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from trl_multiagent import AgentTeam, FunctionEnvironment, workflow
from trl_multiagent.environments.reward_models import RewardModel
from trl_multiagent.environments.yaml_task import TASK
from trl_multiagent.hub import team_card, team_files
from trl_multiagent.models.gguf import converted, gguf_file_of
from trl_multiagent.rollout.sampling_arguments import sampling_arguments
from trl_multiagent.runs.models import loading_arguments
from trl_multiagent.runs.plan import plan_size
from trl_multiagent.settings.schema import AgentModel
from trl_multiagent.team.card import facts_of
from trl_multiagent.team.critics import load_backbone
from trl_multiagent.team.load import LoadError, TeamLoader, load_player

from prepared import parse_recipe
from tiny import FORMS, Workflow, byte_tokenizer, count_reward, team_of, tiny_environment, tiny_llama, tiny_team


def lora_team(path, roles=("aux", "main"), share_weights=False, target_modules="all-linear", seed=42, **config):
    config = LoraConfig(r=4, target_modules=target_modules, **config)
    return AgentTeam.from_pretrained(path, list(roles), peft_config=config, share_weights=share_weights, seed=seed)


def partly_shared():
    one, other = tiny_llama(), tiny_llama()
    return AgentTeam({"a": one, "b": one, "c": other}, dict.fromkeys("abc", byte_tokenizer()))


def with_templates():
    templates = {role: f"{role} {{{{ messages }}}}" for role in "ab"}
    tokenizers = {role: byte_tokenizer(chat_template=text) for role, text in templates.items()}
    return AgentTeam(dict.fromkeys("ab", tiny_llama()), tokenizers)


def saved_adapter(path):
    folder = f"{path}_adapter"
    lora_team(path).save_pretrained(folder)
    return f"{folder}/agents/aux"


def wrongly_named():
    return AgentTeam({"x": get_peft_model(tiny_llama(), LoraConfig(target_modules="all-linear"))}, {"x": None})


def logits(team, role):
    with team.activate(role) as agent, torch.no_grad():
        return agent(torch.tensor([[65, 66, 67]])).logits


def test_one_model_for_all_agents_or_one_for_each(tiny_model, tmp_path):
    team = AgentTeam.from_pretrained(tiny_model, roles=["aux", "main"])
    left, right = (team.agents[role].model.embed_tokens.weight for role in team.roles)
    assert torch.equal(left, right) and left.data_ptr() != right.data_ptr() and team.dtype == torch.float32
    tiny_llama(hidden_size=16).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    team = AgentTeam.from_pretrained([tiny_model, str(tmp_path)], roles=["aux", "main"], dtype="bfloat16")
    assert [agent.config.hidden_size for agent in team.agents.values()] == [32, 16]
    assert {agent.dtype for agent in team.agents.values()} == {torch.bfloat16}


def test_arguments_for_tokenizers(tmp_path):
    tiny_team().save_pretrained(tmp_path)
    team = AgentTeam.from_pretrained(str(tmp_path), tokenizer_kwargs={"model_max_length": 77})
    assert [tokenizer.model_max_length for tokenizer in team.tokenizers.values()] == [77, 77]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda path: AgentTeam({"a": tiny_llama()}, {"b": byte_tokenizer()}), r"\['a'\], the tokenizers for \['b'\]"),
        (lambda path: AgentTeam.from_pretrained(path), "pass `roles`"),
        (lambda path: AgentTeam.from_pretrained([path], roles=["a", "b"]), "1 models for the 2 roles"),
        (lambda path: AgentTeam.from_pretrained([path, "other"], ["a", "b"], share_weights=True), "one model for all"),
        (lambda path: lora_team(path, share_weights=True), "excludes `share_weights`"),
        (lambda path: AgentTeam.from_pretrained(saved_adapter(path), ["x"], share_weights=True), "excludes `share_w"),
        (lambda path: AgentTeam.from_pretrained(path, ["a"], {"b": LoraConfig()}), r"has the roles \['b'\], the team"),
        (lambda path: lora_team(path, ("aux", "layers")), "'layers' is part of the names"),
        (lambda path: lora_team(path, ("aux", "weight")), "'weight' is part of the names"),
        (lambda path: lora_team(path, ("aux", "base_model")), "'base_model' is part of the names"),
        (lambda path: lora_team(path, ("lora_A", "main")), "'lora_A' is part of the names"),
        (lambda path: lora_team(path, init_lora_weights="pissa"), "is 'pissa', which changes the base"),
        (lambda path: lora_team(path, megatron_config={"x": 1}), "`megatron_config` of the adapter of an agent is"),
        (
            lambda path: lora_team(path, target_modules=["lm_head"]),
            r"^`target_modules` of .*covers the output",
        ),
        (
            lambda path: lora_team(path, trainable_token_indices=[1]),
            r"^`trainable_token_indices` .* tied",
        ),
        (lambda path: lora_team(path, modules_to_save=["lm_head"]), r"^`modules_to_save` of .*covers the output"),
        (lambda path: lora_team(path, modules_to_save=["norm", "score"]), "names 'score', but no module of the model"),
        (lambda path: partly_shared(), "Either all agents of a team share one model"),
        (lambda path: with_templates(), "saved with one tokenizer"),
        (lambda path: wrongly_named(), r"has the adapters \['default'\]; name one as the role"),
        (lambda path: team_of("shared").freeze(["aux"]), "none of them can be frozen"),
    ],
)
def test_invalid_teams_are_refused(build, message, tiny_model):
    with pytest.raises(ValueError, match=message):
        build(tiny_model)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ("main", r"must be a list with one name per agent, such as \['aux', 'main'\], not 'main'"),
        ({"aux", "main"}, "must be a list with one name per agent"),
        (["Aux", "aux"], r"\['Aux', 'aux'\] has one twice \(case does not count\)"),
        ([], "at least one agent"),
        (["class"], "'class' must be a Python identifier and no keyword"),
        (["train", "test"], "'train' is a method or an attribute of torch modules"),
        (["a", "a_reference"], "'a_reference' names the reference policy of 'a'"),
    ],
)
def test_roles_that_cannot_name_agents_are_refused(roles, message):
    with pytest.raises(ValueError, match=message):
        AgentTeam.from_pretrained("nothing/is-loaded", roles=roles)


def test_roles_that_differ_from_the_saved_ones_are_refused(tmp_path):
    tiny_team().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has the roles \['aux', 'main'\], not \['x', 'y'\]"):
        AgentTeam.from_pretrained(str(tmp_path), roles=["x", "y"])


@pytest.mark.parametrize("argument", ["cache_dir", "subfolder", "local_files_only"])
def test_arguments_that_only_models_would_get_are_refused(argument):
    with pytest.raises(TypeError, match=rf"takes no `{argument}`: "):
        AgentTeam.from_pretrained("nothing/is-loaded", ["aux"], **{argument: "x"})


@pytest.mark.parametrize("form", FORMS)
def test_every_form_saves_and_loads(tmp_path, form):
    team = team_of(form)
    for k, model in enumerate(team.models.values()):
        tiny_llama(k).save_pretrained(tmp_path / f"base{k}")
        for config in getattr(model, "peft_config", {}).values():
            config.base_model_name_or_path = str(tmp_path / f"base{k}")
    expected = {role: logits(team, role) for role in team.roles}
    assert not torch.equal(expected["aux"], expected["main"]) or form == "shared"
    team.save_pretrained(tmp_path / "team")
    loaded = AgentTeam.from_pretrained(str(tmp_path / "team"))
    assert (loaded.form, loaded.adapted_roles, len(loaded.models)) == (team.form, team.adapted_roles, len(team.models))
    for role in team.roles:
        assert torch.equal(logits(loaded, role), expected[role])
        folder = tmp_path / "team" / "agents" / ("shared" if form == "shared" else role)
        is_adapter = role in team.adapted_roles
        alone = (AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM).from_pretrained(folder)
        assert torch.equal(alone(torch.tensor([[65, 66, 67]])).logits, expected[role])
        assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"] == [64]
    changed = team_of(form)
    with torch.no_grad():
        for role in changed.roles:
            for parameter in changed.agent_parameters(role):
                parameter.add_(0.1)
    changed.load_weights(tmp_path / "team")
    for role in team.roles:
        assert torch.equal(logits(changed, role), expected[role])


def test_a_team_of_adapters_and_full_models(tiny_model, tmp_path):
    """A fresh adapter is that of a LoRA team, and the full model that of a full team."""
    roles, config = ["aux", "main", "judge"], LoraConfig(r=4, target_modules="all-linear")
    team = AgentTeam.from_pretrained(tiny_model, roles, {"main": config})
    assert (team.form, team.adapted_roles, team.roles) == ("mixed", ("main",), tuple(roles))
    assert torch.equal(adapter(team, "main"), adapter(lora_team(tiny_model, roles), "main"))
    assert all(x.requires_grad for x in team.policies["aux"].parameters())
    team.save_pretrained(tmp_path / "team")
    folders = [str(tmp_path / "team" / "agents" / role) for role in ("main", "aux")]
    again = AgentTeam.from_pretrained(dict(zip(("main", "aux"), folders, strict=True)))
    assert again.roles == ("main", "aux") and again.adapted_roles == ("main",)
    assert again["aux"] == (again.policies["aux"], again.tokenizers["aux"])
    with pytest.raises(KeyError, match="no role 'judge': its roles are main, aux"):
        again["judge"]
    with pytest.raises(ValueError, match="but the roles are"):
        AgentTeam.from_pretrained({"main": folders[0]}, ["main", "aux"])
    with pytest.raises(ValueError, match="has a LoRA adapter, which is loaded: leave `peft_config` out"):
        AgentTeam.from_pretrained(folders, ["main", "aux"], config)
    assert AgentTeam.from_pretrained(folders, ["main", "aux"], {"aux": config}).form == "lora"


def adapter(team, role):
    state = get_peft_model_state_dict(team.policies[role], adapter_name=role)
    return torch.cat([x.flatten() for _, x in sorted(state.items())])


@pytest.mark.parametrize("config", [{}, {"modules_to_save": ["norm", "mlp"]}], ids=str)
def test_fresh_adapters_depend_on_the_seed_and_the_role(tiny_model, tmp_path, config):
    shutil.copytree(tiny_model, tmp_path / "other")
    other = str(tmp_path / "other")
    first = lora_team(tiny_model, **config)
    torch.manual_seed(3)  # loading neither depends on nor changes the global generator
    state = torch.get_rng_state()
    again = lora_team(tiny_model, **config)
    assert torch.equal(torch.get_rng_state(), state)
    variants = {
        "again": again,
        "with more roles, in another order": lora_team(tiny_model, ("more", "main", "aux"), **config),
        "on bases of their own": lora_team([tiny_model, other], **config),
    }
    for name, team in variants.items():
        for role in ("aux", "main"):
            assert torch.equal(adapter(team, role), adapter(first, role)), name
    assert not torch.equal(adapter(first, "aux"), adapter(first, "main"))
    seeded = lora_team(tiny_model, seed=43, **config)
    assert not any(torch.equal(adapter(seeded, role), adapter(first, role)) for role in ("aux", "main"))


def test_weights_that_a_file_lacks_depend_on_the_seed(tmp_path):
    tiny_llama(tie_word_embeddings=False).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    roles = ["aux", "main"]
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    for settings in ({}, {"share_weights": True}, lora):
        state = torch.get_rng_state()
        teams = [AgentTeam.from_pretrained(str(tmp_path), roles, seed=seed, **settings) for seed in (1, 1, 2)]
        assert torch.equal(torch.get_rng_state(), state)
        heads = [[agent.lm_head.weight for agent in team.agents.values()] for team in teams]
        assert all(torch.equal(*pair) for pair in zip(heads[0], heads[1], strict=True))
        assert not any(torch.equal(*pair) for pair in zip(heads[0], heads[2], strict=True))
        assert torch.equal(*heads[0]) == bool(settings)


def test_a_team_can_be_loaded_from_saved_adapters(tiny_model, tmp_path):
    first = lora_team(tiny_model, init_lora_weights=False)
    first.save_pretrained(tmp_path)
    folders = [str(tmp_path / "agents" / role) for role in ("main", "aux")]
    team = AgentTeam.from_pretrained(folders, roles=["left", "right"])
    assert len(team.models) == 1
    assert torch.equal(logits(team, "left"), logits(first, "main"))
    assert torch.equal(logits(team, "right"), logits(first, "aux"))


def test_one_adapter_plays_several_roles(tiny_model):
    """Each has a copy, because adapters are not shared."""
    assert load_player(saved_adapter(tiny_model), ["x", "y"]).form == "lora"


FOREIGN = {
    '{"megatron_config": {"x": 1}, "megatron_core": "evil"}': "`megatron_config` of the adapter in",
    '{"peft_type": "IA3"}': "`peft_type` of the adapter in .* is 'IA3', which is not supported",
    '{"base_model_name_or_path": null}': "is damaged: `base_model_name_or_path` names no base",
    '{"bias": "all"}': "`bias` of the adapter in .* is 'all'",
    '{"something": 1}': "`something` of the adapter in .* is 1, which is not supported",
    '{"init_lora_weights": "pissa"}': "`init_lora_weights` of the adapter in .* is 'pissa'",
    '{"rank_pattern": [1]}': "cannot be loaded",
    "[]": "is damaged",
    "[" * 100_000: "is damaged",
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_foreign_adapter_is_refused_in_one_line_before_peft_builds_it(foreign, tiny_model, tmp_path, monkeypatch):
    team = lora_team(tiny_model)
    team.save_pretrained(tmp_path / "team")
    (tmp_path / "evil.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "team/agents/aux/adapter_config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, **json.loads(foreign)}) if foreign[0] == "{" else foreign)
    with pytest.raises(LoadError, match=FOREIGN[foreign]) as raised:
        TeamLoader(str(tmp_path / "team")).load(["aux", "main"], "float32", "float32", 0)
    assert "\n" not in str(raised.value)


def test_an_adapter_in_the_place_of_a_whole_model_is_not_built(tiny_model, tmp_path):
    """transformers would build one that lies beside a base, or beside an agent in a checkpoint."""
    lora_team(tiny_model).save_pretrained(tmp_path / "lora")
    full = AgentTeam.from_pretrained(tiny_model, roles=["aux", "main"])
    full.save_pretrained(tmp_path / "full")
    shutil.copy(tmp_path / "lora/agents/aux/adapter_config.json", tmp_path / "full/agents/aux")
    with pytest.raises(ValueError, match=r"aux holds an adapter \(adapter_config.json\), where a whole model is"):
        full.load_weights(tmp_path / "full")


def test_a_pickle_that_could_run_code_is_one_line(tiny_model, tmp_path):
    class Pickled:
        def __reduce__(self):
            return (pytest.fail, ("it ran",))

    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    name = str(tmp_path / "model")
    for content in (Pickled(), {"x": Pickled()}):
        torch.save(content, tmp_path / "model/pytorch_model.bin")
        for load in (
            lambda: TeamLoader(name).load(["aux", "main"], "float32", "float32", 0),
            lambda: RewardModel(name),
        ):
            with pytest.raises(ValueError, match="a pickle is damaged or could run code") as raised:
                load()
            assert "\n" not in str(raised.value)


def test_no_code_of_a_model_runs_unasked(tiny_model, tmp_path, monkeypatch):
    """Nothing asks on the terminal whether it may run, either."""
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked"))
    shutil.copytree(tiny_model, tmp_path / "model")
    path = tmp_path / "model/config.json"
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoModel": "own.Model"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "own", "auto_map": auto_map}))
    (tmp_path / "model/own.py").write_text("raise SystemExit")
    loads = [
        lambda name: AgentTeam.from_pretrained(name, roles=["aux", "main"]),
        lambda name: load_backbone(name, torch.float32),
        RewardModel,
        lambda name: AgentTeam.from_pretrained(name, roles=["aux", "main"], **loading_arguments(AgentModel())),
    ]
    for load in loads:
        with pytest.raises(ValueError, match="trust_remote_code"):
            load(str(tmp_path / "model"))


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "own"
class Model(LlamaForCausalLM):
    config_class = Config
"""


def test_the_weights_of_a_model_with_code_of_its_own_are_replaced(tiny_model, tmp_path, monkeypatch):
    """Its code was asked for when the team was loaded."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    shutil.copytree(tiny_model, tmp_path / "model")
    path = tmp_path / "model/config.json"
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "own", "auto_map": auto_map}))
    (tmp_path / "model/own.py").write_text(OWN_CODE)
    team = AgentTeam.from_pretrained(tmp_path / "model", roles=["aux", "main"], trust_remote_code=True)
    team.save_pretrained(tmp_path / "team")
    saved = {name: x.clone() for name, x in team.state_dict().items()}
    for parameter in team.parameters():
        parameter.data.zero_()
    team.load_weights(tmp_path / "team")
    assert all(torch.equal(x, saved[name]) for name, x in team.state_dict().items())


def test_a_lora_team_saves_only_its_adapters(tmp_path):
    team = team_of("lora")
    team.keep_reference()
    team.save_pretrained(tmp_path, state_dict=team.state_dict())
    assert {path.name for path in (tmp_path / "agents").iterdir()} == {"aux", "main"}
    for role in team.roles:
        saved = load_file(tmp_path / "agents" / role / "adapter_model.safetensors")
        assert len(saved) == len(team.agent_parameters(role)) and all("lora_" in name for name in saved)


def test_a_folder_of_full_agents_that_gets_adapters_holds_no_other_weights(tmp_path):
    """A push sends the agents of the team alone."""
    tiny_team(("aux", "old")).save_pretrained(tmp_path)
    team_of("lora").save_pretrained(tmp_path)
    weights = {f"agents/{role}/adapter_model.safetensors" for role in ("aux", "main")}
    sent = team_files(tmp_path)
    assert {file for file in sent if "safetensors" in file} == weights


@pytest.mark.parametrize("copied", ["norm", "embed_tokens"])
def test_copies_of_modules_on_a_base_in_16_bits_are_sampled_with(tmp_path, copied):
    tiny_llama(tie_word_embeddings=False).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[copied])
    team = AgentTeam.from_pretrained(tmp_path, ["aux", "main"], config, base_dtype="bfloat16")
    team.collaborate("Say", DIALOGUE, max_new_tokens=2)
    assert not torch.is_autocast_enabled("cpu")


def again(item, history):
    """Each agent reads the reward of the last turn."""
    return {role: f"{role} got {history[-1].outcome.reward}. Again:" for role in ("aux", "main")}


FIRST = {role: f"{role}: {{prompt}}" for role in ("aux", "main")}
DIALOGUE = FunctionEnvironment(FIRST, count_reward, transition=again)


@workflow(roles=("aux", "main"))
async def twice(item, agents):
    return float(len(await agents.main(await agents.aux(item["prompt"]))))


def check_answers(team, turns):
    """Each agent answers greedily to its own turns."""
    for role in team.roles:
        tokenizer = team.tokenizers[role]
        read: list[int] = []  # a turn's prompt begins with the tokens of the agent's turn before
        for turn in (turn for turn in turns if role in turn.prompts):
            read += tokenizer(("\n\n" if read else "") + turn.prompts[role])["input_ids"]
            with team.activate(role) as agent:
                greedy = agent.generate(torch.tensor([read]), do_sample=False, max_new_tokens=6)[0, len(read) :]
            assert turn.joint_action[role] == tokenizer.decode(greedy, skip_special_tokens=True)
            read += [x for x in greedy.tolist() if x != tokenizer.eos_token_id]


@pytest.mark.parametrize("form", ["full", "shared", "mixed"])
def test_collaborate_plays_an_episode(form):
    team = team_of(form)
    item = {"prompt": "Go.", "extra": 3}
    turns = team.collaborate(item, DIALOGUE, num_turns=2, do_sample=False, max_new_tokens=6)
    assert [set(turn.joint_action) for turn in turns] == [{"aux", "main"}] * 2
    check_answers(team, turns)
    assert turns[1].outcome.reward == count_reward([turns[1].joint_action])[0]


def test_collaborate_with_stop_strings():
    team = tiny_team()

    def answers(strings):
        torch.manual_seed(0)
        (turn,) = team.collaborate({"prompt": "Go."}, DIALOGUE, max_new_tokens=40, stop_strings=strings)
        return turn.joint_action

    whole = answers(None)
    text = whole["main"]
    place = next(k for k, x in enumerate(text) if 1 < k < len(text) - 2 and x.isalnum() and x not in text[:k])
    assert answers({"main": ["never", text[place]]}) == {**whole, "main": text[: place + 1]}


def test_collaborate_with_agents_that_do_not_act():
    """The episodes have several lengths."""
    items, team = [{"x": "12"}, {"x": "1"}, {"x": "1234"}], tiny_team()
    episodes = team.collaborate(items, Workflow(), num_turns=3, max_new_tokens=6, do_sample=False)
    for plan, turns in zip((1, 0, 2), episodes, strict=True):
        assert len(turns) == (3 if turns[1].outcome.reward >= 0.05 else 2)
        assert [tuple(turn.joint_action) for turn in turns] == [*Workflow.plans[plan][: len(turns)]]
        assert all(set(turn.outcome.role_rewards) == {"aux", "main"} for turn in turns)
        check_answers(team, turns)
    assert team.collaborate(items[2], Workflow(), num_turns=3, max_new_tokens=6, do_sample=False) == episodes[2]


def test_collaborate_on_a_text():
    (turn,) = tiny_team().collaborate("Go.", DIALOGUE, max_new_tokens=4)
    assert turn.prompts["aux"] == "aux: Go." and turn.outcome is None
    with pytest.raises(ValueError, match="needs a whole item"):
        tiny_team().collaborate("Go.", DIALOGUE, num_turns=2)
    with pytest.raises(ValueError, match=r"roles \['solo'\], the environment \['aux', 'main'\]"):
        tiny_team(("solo",)).collaborate("Go.", DIALOGUE)
    (turn,) = tiny_team().collaborate("Go.", twice, max_new_tokens=4)
    assert [*turn.joint_action] == ["aux"] and turn.outcome is None


def test_collaborate_on_many_items():
    team = tiny_team()
    items = [{"prompt": text} for text in ("Go.", "Stop here.", "", "Go.")]
    settings = {"num_turns": 2, "temperature": 0, "max_new_tokens": 6}
    alone = [team.collaborate(item, DIALOGUE, **settings) for item in items]
    calls = []
    for agent in team.agents.values():
        agent.register_forward_pre_hook(lambda *_: calls.append(0))
    for given in (items, (item for item in items), Dataset.from_list(items)):
        calls.clear()
        assert team.collaborate(given, DIALOGUE, **settings) == alone
        assert len(calls) <= 2 * 2 * 7  # two turns of two agents: a prompt and six tokens each
    assert team.collaborate(items, DIALOGUE, generation_token_budget=1, **settings) == alone
    assert team.collaborate([], DIALOGUE) == []
    texts = team.collaborate(["Go.", "Stop here."], DIALOGUE, temperature=0, max_new_tokens=6)
    for (turn,), turns in zip(texts, alone, strict=False):
        assert (turn.joint_action, turn.outcome) == (turns[0].joint_action, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperatur": 1}, "Unknown argument `temperatur=1`: did you mean `temperature`\\?"),
        ({"num_turns": 0}, "`num_turns` is 0; it must be a whole number of at least 1"),
        ({"temperature": -1}, "`temperature` is -1; it must be a number from 0"),
        ({"temperature": 0, "do_sample": True}, "which `do_sample=True` contradicts"),
        ({"num_return_sequences": 2}, "`num_return_sequences` cannot be set here: pass an item several times"),
        ({"eos_token_id": [3]}, "`eos_token_id` cannot be set here: set the tokenizer's `eos_token`"),
        ({"stop_strings": {"x": ["."]}}, "is {'x': \\['.'\\]}; it must have lists of texts for aux, main"),
        ({"item": [{"prompt": "Go."}, "Go."]}, "must be a row of the dataset, which is a dict, or a text, or a list"),
    ],
)
def test_collaborate_refuses(arguments, message):
    team = tiny_team()
    with pytest.raises((TypeError, ValueError), match=message) as error:
        team.collaborate(**{"item": {"prompt": "Go."}, "environment": DIALOGUE, **arguments})
    assert "\n" not in str(error.value)
    assert team.training


def test_an_argument_that_is_none_is_not_given():
    """`generate` would use transformers' own default, the best 50 tokens."""
    assert sampling_arguments({"top_k": None}) == sampling_arguments({})


def test_collaborate_as_chat():
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    team = tiny_team(chat_template=template)
    chat = team.collaborate("Go.", DIALOGUE, do_sample=False, max_new_tokens=6)[0].joint_action["main"]
    ids = team.tokenizers["main"]("<user>main: Go.<assistant>", return_tensors="pt")["input_ids"]
    greedy = team.agents["main"].generate(ids, do_sample=False, max_new_tokens=6)[0, ids.size(1) :]
    assert chat == team.tokenizers["main"].decode(greedy, skip_special_tokens=True)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="names no token that ends a text: give it as `tokenizer_kwargs`"):
        AgentTeam.from_pretrained(tmp_path, ["aux"])
    assert AgentTeam.from_pretrained(tmp_path, ["aux"], tokenizer_kwargs={"eos_token": "<eos>"}).roles == ("aux",)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    GPT2Config().save_pretrained(tmp_path)  # of which transformers makes an empty one
    with pytest.raises(ValueError, match="has no tokenizer: save one there"):
        AgentTeam.from_pretrained(tmp_path, ["aux"])


def test_an_adapter_without_a_tokenizer_has_its_base_s(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    team = AgentTeam.from_pretrained(tmp_path / "base", ["aux", "main"], LoraConfig(r=2))
    team.save_pretrained(tmp_path / "team")
    for file in tmp_path.glob("team/agents/*/tokenizer*"):
        file.unlink()
    again = AgentTeam.from_pretrained(tmp_path / "team")
    assert again.tokenizers["main"].get_vocab() == team.tokenizers["main"].get_vocab()


def test_the_model_alone_may_name_the_end_token():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    team = AgentTeam({"aux": tiny_llama()}, {"aux": tokenizer})
    assert team.end_tokens("aux") == [256]
    assert team.collaborate({"x": "1"}, tiny_environment(("aux",)), max_new_tokens=4)
    team.agents["aux"].generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="Neither the tokenizer of 'aux' nor its model names a token that ends a"):
        team.end_tokens("aux")


def test_an_adapter_of_nobody_is_not_trained():
    config = LoraConfig(r=4, target_modules="all-linear")
    model = get_peft_model(tiny_llama(), config)  # with an adapter "default"
    for role in ("aux", "main"):
        model.add_adapter(role, config)
    AgentTeam({"aux": model, "main": model}, dict.fromkeys(("aux", "main"), byte_tokenizer()))
    trained = {name.split(".")[-2] for name, x in model.named_parameters() if x.requires_grad}
    assert trained == {"aux", "main"}


@pytest.fixture
def gguf_file(tmp_path):
    """The file of a tiny model."""
    file = tmp_path / "gguf" / "model.gguf"
    file.parent.mkdir()
    write_gguf(file, tiny_llama())
    return file


def write_gguf(file, model, left_out=()):
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = ["t", "1", *(f"t{k}" for k in range(1, config.vocab_size - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name not in left_out:
            writer.add_tensor(names.get_name(name, (".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_that_lacks_weights_is_refused(tmp_path):
    """transformers would give them random numbers. A tied head is none of its own."""
    file, name = tmp_path / "model.gguf", "model.layers.1.mlp.down_proj.weight"
    for tied in (True, False):
        model = tiny_llama(tie_word_embeddings=tied)
        write_gguf(file, model, left_out=[name])
        with pytest.raises(ValueError, match=rf"model\.gguf lacks 1 weights, the first of which is {name}\."):
            AgentTeam.from_pretrained(file, ["aux"])
        assert not [*tmp_path.rglob("*.safetensors")]
        write_gguf(file, model, left_out=["lm_head.weight"] if tied else [])
        read = AgentTeam.from_pretrained(file, ["aux"]).agents["aux"]
        assert torch.equal(read.get_output_embeddings().weight, model.get_output_embeddings().weight)


def test_an_adapter_whose_gguf_file_is_gone(gguf_file, tmp_path):
    config = LoraConfig(target_modules="all-linear")
    AgentTeam.from_pretrained(gguf_file, ["aux", "main"], config).save_pretrained(tmp_path / "team")
    gguf_file.unlink()
    with pytest.raises(OSError, match=rf"^{gguf_file} does not exist\. A saved adapter needs the model that"):
        AgentTeam.from_pretrained(tmp_path / "team")


def test_a_gguf_file_is_converted_once(gguf_file, tmp_path, monkeypatch, capsys):
    """A plan reads its header once and no weights. A changed file is converted again, a damaged one leaves nothing."""
    import gguf

    headers, tensors, read, dequantize = [], [], gguf.GGUFReader, gguf.dequantize
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: headers.append(path) or read(path))
    monkeypatch.setattr(gguf, "dequantize", lambda *x: tensors.append(x) or dequantize(*x))
    monkeypatch.setenv("TRL_MULTIAGENT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text('{"x": "1"}\n')
    task = f"{{agent_model: {{name: {gguf_file}}}, dataset: {{name: {tmp_path}/rows.jsonl}},"
    task += "prompts: {aux: '{x}', main: '{x}'}, reward_funcs: [trl.rewards.think_format_reward]}"
    (tmp_path / "run.yaml").write_text(task)
    run = parse_recipe("magrpo", TASK, ["--config", str(tmp_path / "run.yaml")])
    size = plan_size(run, run.make_environment(), [{"x": "1"}])
    assert len(headers) == 1 and not tensors
    team = AgentTeam.from_pretrained(gguf_file, ["aux", "main"])
    assert size.trained == sum(x.numel() for x in team.parameters())
    assert "model.gguf: converting its weights, once" in capsys.readouterr().err and tensors
    seen, folder = len(headers), Path(converted(str(gguf_file)))
    again = AgentTeam.from_pretrained(gguf_file, ["aux", "main"])
    assert len(headers) == seen and not capsys.readouterr().err
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), team.parameters(), strict=True))
    assert [x.name for x in folder.parent.iterdir() if x.is_dir()] == [folder.name]
    # Processes that start together wait for one of them
    (folder / "model.safetensors").unlink()
    with ThreadPoolExecutor(3) as threads:
        assert {*threads.map(converted, 3 * [str(gguf_file)])} == {str(folder)}
    assert capsys.readouterr().err.count("converting its weights") == 1
    # A changed file. What somebody else has put beside its conversion stays
    (folder.parent / "mine").mkdir()
    whole = gguf_file.read_bytes()
    number = team.agents["aux"].get_input_embeddings().weight[0, :4].detach().numpy().tobytes()
    assert number in whole
    status = gguf_file.stat()
    gguf_file.write_bytes(whole.replace(number, bytes(16)))
    os.utime(gguf_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = AgentTeam.from_pretrained(gguf_file, ["aux"])
    assert not changed.agents["aux"].get_input_embeddings().weight[0, :4].any() and not folder.exists()
    assert (folder.parent / "mine").is_dir()
    # A damaged file, and a folder that is not writable
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert Path(converted(str(gguf_file))).is_relative_to(tmp_path / "cache")
    gguf_file.write_bytes(whole[:-64])
    with pytest.raises(ValueError):
        AgentTeam.from_pretrained(gguf_file, ["aux"])
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]
    gguf_file.write_bytes(whole)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(OSError, match=r"less than the 0\.0 GB that converted weights need"):
        converted(str(gguf_file))


def test_a_model_in_a_gguf_file_is_trained_and_saved(gguf_file, tmp_path, monkeypatch):
    """transformers itself saves no model that it read from such a file."""
    model, folder = tiny_llama(), gguf_file.parent
    team = AgentTeam.from_pretrained(folder / "model.gguf", ["aux", "main"])
    outline = AgentTeam.from_pretrained(folder / "model.gguf", ["aux", "main"], device_map="meta")  # of a resumed run
    assert {x.device.type for x in outline.parameters()} == {"meta"}
    team.save_pretrained(tmp_path / "team")
    again = AgentTeam.from_pretrained(tmp_path / "team")
    ids = torch.arange(8)[None]
    assert torch.equal(again.agents["main"](ids).logits, team.agents["main"](ids).logits)
    assert torch.equal(again.agents["aux"].get_input_embeddings().weight, model.get_input_embeddings().weight)
    critic = load_backbone(str(folder / "model.gguf"), torch.float32)
    assert torch.equal(critic.get_input_embeddings().weight, model.get_input_embeddings().weight)
    # A saved adapter names the file
    config = {"aux": LoraConfig(target_modules="all-linear")}
    mixed = AgentTeam.from_pretrained(folder / "model.gguf", ["aux", "main"], config)
    mixed.save_pretrained(tmp_path / "mixed")
    again = AgentTeam.from_pretrained(tmp_path / "mixed")
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), mixed.parameters(), strict=True))
    card = str(team_card(facts_of(mixed)[:1], str(tmp_path / "mixed")))
    names = {}
    exec(card.split("```python\n")[2].split("```")[0], names)
    with mixed.activate("aux") as agent:
        assert torch.equal(names["model"].eval()(ids).logits, agent(ids).logits)
    named = AgentTeam.from_pretrained(folder, ["aux"], gguf_file="model.gguf")  # as in a repository
    assert torch.equal(named.agents["aux"](ids).logits, team.agents["aux"](ids).logits)
    assert named.agents["aux"].name_or_path == str(folder / "model.gguf")
    assert gguf_file_of("org/model/a.gguf") == ("org/model", "a.gguf")
    card = str(team_card([{**facts_of(mixed)[0], "base": "org/model"}], "user/team"))
    assert 'base = AutoModelForCausalLM.from_pretrained("org/model", gguf_file="model.gguf")' in card
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"x": "1"}\n')
    task = "{agent_model: {name: gguf, gguf_file: model.gguf}, dataset: {name: rows.jsonl},"
    task += "prompts: {aux: '{x}', main: '{x}'}, reward_funcs: [trl.rewards.think_format_reward]}"
    (tmp_path / "run.yaml").write_text(task)
    run = parse_recipe("magrpo", TASK, ["--config", "run.yaml"])
    assert plan_size(run, run.make_environment(), [{"x": "1"}]).trained == 2 * named.agents["aux"].num_parameters()

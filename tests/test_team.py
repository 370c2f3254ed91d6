import json
import shutil

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_multiagent import AgentTeam, FunctionEnvironment
from trl_multiagent.environments import TaskError
from trl_multiagent.trainers.base.rollout_trainer import check_team

from tiny import FORMS, Workflow, byte_tokenizer, count_reward, team_of, tiny_environment, tiny_llama, tiny_team


def lora_team(path, roles=("aux", "main"), share_weights=False, target_modules="all-linear", seed=42, **config):
    config = LoraConfig(r=4, target_modules=target_modules, **config)
    return AgentTeam.from_pretrained(path, list(roles), peft_config=config, share_weights=share_weights, seed=seed)


def partly_shared():
    one, other = tiny_llama(), tiny_llama()
    return AgentTeam({"a": one, "b": one, "c": other}, dict.fromkeys("abc", byte_tokenizer()))


def wrongly_named():
    return AgentTeam({"x": get_peft_model(tiny_llama(), LoraConfig(target_modules="all-linear"))}, {"x": None})


def logits(team, role):
    with team.activate(role) as agent, torch.no_grad():
        return agent(torch.tensor([[65, 66, 67]])).logits


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


def test_arguments_for_tokenizers(tmp_path):
    tiny_team().save_pretrained(tmp_path)
    team = AgentTeam.from_pretrained(str(tmp_path), tokenizer_kwargs={"model_max_length": 77})
    assert [tokenizer.model_max_length for tokenizer in team.tokenizers.values()] == [77, 77]


def test_load_weights_replaces_the_weights_of_a_team_with_the_same_roles(tmp_path):
    tiny_team().save_pretrained(tmp_path)
    other = AgentTeam({role: tiny_llama(9) for role in ("aux", "main")}, tiny_team().tokenizers)
    other.load_weights(tmp_path)
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in tiny_team().state_dict().items())
    with pytest.raises(ValueError, match=r"roles \['aux', 'main'\], this one \['solo'\]"):
        tiny_team(("solo",)).load_weights(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"form": "full", "agents', r"team\.json is damaged: Unterminated"),
        ('{"format_version": 1, "form": "full", "agents": ["aux"]}', r"team\.json is damaged: string indices"),
        ('{"format_version": 7, "form": "full", "agents": [{"role": "a", "folder": "a"}]}', "format version 7"),
    ],
)
def test_a_damaged_team_file_is_named(text, problem, tmp_path):
    (tmp_path / "team.json").write_text(text)
    with pytest.raises(ValueError, match=problem):
        AgentTeam.from_pretrained(str(tmp_path))


def test_forward_runs_every_agent_on_its_own_inputs():
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
        (lambda path: AgentTeam.from_pretrained([path, "other"], ["a", "b"], share_weights=True), "one model for all"),
        (lambda path: lora_team(path, share_weights=True), "excludes `share_weights`"),
        (lambda path: AgentTeam.from_pretrained(path, ["a"], {"b": LoraConfig()}), r"has the roles \['b'\], the team"),
        (lambda path: lora_team(path, ("aux", "lora")), "'lora' is part of the names"),
        (lambda path: lora_team(path, ("aux", "layers")), "'layers' is part of the names"),
        (lambda path: lora_team(path, init_lora_weights="pissa"), "pissa` changes the base"),
        (lambda path: lora_team(path, target_modules=["lm_head"]), "covers the output embeddings"),
        (lambda path: lora_team(path, modules_to_save=["lm_head"]), "covers the output embeddings"),
        (lambda path: lora_team(path, modules_to_save=["norm", "score"]), "names 'score', but no module of the model"),
        (lambda path: lora_team("nothing/is-loaded", modules_to_save="norm"), r"a list of names, such as \['norm'\]"),
        (lambda path: partly_shared(), "Either all agents of a team share one model"),
        (lambda path: AgentTeam(dict(team_of("lora").models, x=tiny_llama()), {}), "the tokenizers for"),
        (lambda path: wrongly_named(), r"has the adapters \['default'\]; name one as the role"),
        (lambda path: tiny_team().freeze(["nobody"]), r"freeze are \['nobody'\], the team has the roles"),
        (lambda path: tiny_team().freeze(["aux", "main"]), "nothing to train"),
        (lambda path: team_of("shared").freeze(["aux"]), "none of them can be frozen"),
    ],
)
def test_invalid_teams_are_refused(build, message, tiny_model):
    with pytest.raises(ValueError, match=message):
        build(tiny_model)


WRONG_ROLES = {
    "main": r"must be a list with one name per agent, such as \['aux', 'main'\], not 'main'",
    ("Aux", "aux"): r"\['Aux', 'aux'\] has one twice \(case does not count\)",
    (): "at least one agent",
    ("",): "'' must be a Python identifier",
    ("class",): "'class' must be a Python identifier and no keyword",
}


@pytest.mark.parametrize("roles", WRONG_ROLES, ids=repr)
def test_roles_that_cannot_name_agents_are_refused(tmp_path, roles):
    with pytest.raises(ValueError, match=WRONG_ROLES[roles]):
        AgentTeam.from_pretrained("nothing/is-loaded", roles=roles)
    environment = tiny_environment()
    environment.roles = roles
    with pytest.raises(ValueError, match=WRONG_ROLES[roles]):
        check_team(tiny_team(), environment, None)
    if roles not in ("main", ("a", "a")):
        with pytest.raises(ValueError, match=WRONG_ROLES[roles]):
            AgentTeam(dict.fromkeys(roles, tiny_llama()), dict.fromkeys(roles, byte_tokenizer()))
        with pytest.raises(ValueError, match=WRONG_ROLES[roles]):
            FunctionEnvironment(dict.fromkeys(roles, "{x}"), count_reward)
    if not isinstance(roles, str):
        (tmp_path / "team.json").write_text(
            json.dumps(
                {"format_version": 1, "form": "full", "agents": [{"role": role, "folder": "x"} for role in roles]}
            )
        )
        with pytest.raises(ValueError, match=WRONG_ROLES[roles]):
            AgentTeam.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"aux", "main"}, "must be a list with one name per agent"),
        (["train", "test"], "'train' is a method or an attribute of torch modules"),
        (["a", "a_reference"], "'a_reference' names the reference policy of 'a'"),
    ],
)
def test_roles_that_cannot_name_modules_are_refused(roles, message):
    with pytest.raises(ValueError, match=message):
        AgentTeam.from_pretrained("nothing/is-loaded", roles=roles)


def test_roles_that_differ_from_the_saved_ones_are_refused(tmp_path):
    tiny_team().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has the roles \['aux', 'main'\], not \['x', 'y'\]"):
        AgentTeam.from_pretrained(str(tmp_path), roles=["x", "y"])


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
    assert AgentTeam.from_pretrained(folders, ["main", "aux"]).adapted_roles == ("main",)
    with pytest.raises(ValueError, match="has a LoRA adapter, which is loaded: leave `peft_config` out"):
        AgentTeam.from_pretrained(folders, ["main", "aux"], config)
    assert AgentTeam.from_pretrained(folders, ["main", "aux"], {"aux": config}).form == "lora"


def adapter(team, role):
    state = get_peft_model_state_dict(team.policies[role], adapter_name=role)
    return torch.cat([x.flatten() for _, x in sorted(state.items())])


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_dora": True},
        {"init_lora_weights": False},
        {"modules_to_save": ["norm", "mlp"]},
    ],
    ids=str,
)
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


def test_every_agent_has_its_own_copy_of_modules_to_save(tiny_model, tmp_path):
    base = AgentTeam.from_pretrained(tiny_model, roles=["solo"])
    team = lora_team(tiny_model, modules_to_save=["norm", "mlp"], target_modules=["q_proj", "gate_proj"])
    expected = logits(base, "solo")
    assert all(torch.equal(logits(team, role), expected) for role in team.roles)
    names = {name.partition(".layers.0.")[2] for name, parameter in team.named_parameters() if parameter.requires_grad}
    copies = [f"mlp.modules_to_save.{{}}.{x}_proj.weight" for x in ("gate", "up", "down")]
    copies += ["input_layernorm.modules_to_save.{}.weight", "post_attention_layernorm.modules_to_save.{}.weight"]
    copies += ["self_attn.q_proj.lora_A.{}.weight", "self_attn.q_proj.lora_B.{}.weight"]
    assert names - {""} == {copy.format(role) for copy in copies for role in team.roles}
    with torch.no_grad():
        for parameter in team.agent_parameters("main"):
            parameter.add_(0.1)
    assert torch.equal(logits(team, "aux"), expected) and not torch.equal(logits(team, "main"), expected)
    team.save_pretrained(tmp_path, state_dict=team.state_dict())
    loaded = AgentTeam.from_pretrained(str(tmp_path))
    assert all(torch.equal(logits(loaded, role), logits(team, role)) for role in team.roles)
    saved = load_file(tmp_path / "agents" / "main" / "adapter_model.safetensors")
    assert len(saved) == len(team.agent_parameters("main"))


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
    with pytest.raises(ValueError, match="has a LoRA adapter, which is loaded: leave `peft_config` out"):
        AgentTeam.from_pretrained(folders, roles=["left", "right"], peft_config=LoraConfig())


def test_adapters_share_one_base_and_are_all_trainable(tiny_model):
    team = lora_team(tiny_model, ("aux", "main", "tester"))
    assert len(team.models) == 1
    trainable = {name for name, parameter in team.named_parameters() if parameter.requires_grad}
    assert trainable and all("lora_" in name for name in trainable)
    assert len(trainable) == 3 * len(team.agent_parameters("aux"))
    plain = AgentTeam.from_pretrained(tiny_model, roles=["solo"])
    for role in team.roles:  # fresh adapters do not change the output
        assert torch.equal(logits(team, role), logits(plain, "solo"))


def test_frozen_agents(tiny_model):
    for team in (tiny_team(), lora_team(tiny_model)):
        team.freeze(["aux"])
        assert team.trained_roles == ("main",) and team.frozen == {"aux"}
        assert not any(parameter.requires_grad for parameter in team.agent_parameters("aux"))
        assert all(parameter.requires_grad for parameter in team.agent_parameters("main"))
        team.freeze(["main"])  # as a later trainer does
        assert all(parameter.requires_grad for parameter in team.agent_parameters("aux"))
        assert not any(parameter.requires_grad for parameter in team.agent_parameters("main"))


def test_the_reference_policy_of_a_lora_team_is_its_initial_policy(tiny_model):
    base = AgentTeam.from_pretrained(tiny_model, roles=["solo"])
    trained = team_of("lora")
    beginning = {role: logits(trained, role) for role in trained.roles}
    for team in (lora_team(tiny_model), lora_team(tiny_model, modules_to_save=["norm", "embed_tokens"]), trained):
        trainable = {name for name, parameter in team.named_parameters() if parameter.requires_grad}
        team.keep_reference()
        assert trainable == {name for name, parameter in team.named_parameters() if parameter.requires_grad}
        with torch.no_grad():
            for role in team.roles:
                for parameter in team.agent_parameters(role):
                    parameter.add_(0.1)
        after = {role: logits(team, role) for role in team.roles}
        with team.as_reference():
            expected = beginning if team is trained else {role: logits(base, "solo") for role in team.roles}
            for role in team.roles:
                assert torch.equal(logits(team, role), expected[role])
        for role in team.roles:
            assert torch.equal(logits(team, role), after[role]) and not torch.equal(after[role], expected[role])
        team.keep_reference()  # as a later trainer does
        with team.as_reference():
            assert all(torch.equal(logits(team, role), after[role]) for role in team.roles)


def test_a_lora_team_saves_only_its_adapters(tmp_path):
    team = team_of("lora")
    team.keep_reference()
    team.save_pretrained(tmp_path, state_dict=team.state_dict())
    assert {path.name for path in (tmp_path / "agents").iterdir()} == {"aux", "main"}
    for role in team.roles:
        saved = load_file(tmp_path / "agents" / role / "adapter_model.safetensors")
        assert len(saved) == len(team.agent_parameters(role)) and all("lora_" in name for name in saved)
    with pytest.raises(ValueError, match="has the form 'full', this one 'lora'"):
        tiny_team().save_pretrained(tmp_path / "full")
        team.load_weights(tmp_path / "full")


def test_a_gathered_state_dict_is_saved_without_tied_copies(tmp_path):
    team = tiny_team()
    gathered = {name: x.clone() for name, x in team.state_dict().items()}
    team.save_pretrained(tmp_path, state_dict=gathered)
    saved = load_file(tmp_path / "agents" / "aux" / "model.safetensors")
    assert "model.embed_tokens.weight" in saved and "lm_head.weight" not in saved
    loaded = AgentTeam.from_pretrained(str(tmp_path))
    assert all(torch.equal(logits(loaded, role), logits(team, role)) for role in team.roles)


def dialogue(*roles):
    """Each agent reads the reward of the last turn."""

    def again(item, history):
        return {role: f"{role} got {history[-1].outcome.reward}. Again:" for role in roles}

    return FunctionEnvironment({role: f"{role}: {{prompt}}" for role in roles}, count_reward, transition=again)


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


@pytest.mark.parametrize("form", FORMS)
def test_collaborate_plays_an_episode(form):
    team = team_of(form)
    environment = dialogue("aux", "main")
    item = {"prompt": "Go.", "extra": 3}
    turns = team.collaborate(item, environment, num_turns=2, do_sample=False, max_new_tokens=6)
    assert [set(turn.joint_action) for turn in turns] == [{"aux", "main"}] * 2
    check_answers(team, turns)
    assert turns[1].outcome.reward == count_reward([turns[1].joint_action])[0]


def test_collaborate_with_stop_strings():
    team, environment = tiny_team(), dialogue("aux", "main")

    def answers(strings):
        torch.manual_seed(0)
        (turn,) = team.collaborate({"prompt": "Go."}, environment, max_new_tokens=40, stop_strings=strings)
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


def test_calls_that_a_single_model_takes():
    with pytest.raises(TypeError, match=r"`team\.collaborate` answers items and texts"):
        tiny_team().generate("hi")
    with pytest.raises(TypeError, match="give its options as `tokenizer_kwargs`"):
        AgentTeam.from_pretrained("nothing/is-loaded", ["a"], tokenizer=byte_tokenizer())


def test_collaborate_on_a_text():
    environment = dialogue("aux", "main")
    (turn,) = tiny_team().collaborate("Go.", environment, max_new_tokens=4)
    assert turn.prompts["aux"] == "aux: Go." and turn.outcome is None
    with pytest.raises(ValueError, match="needs a whole item"):
        tiny_team().collaborate("Go.", environment, num_turns=2)
    with pytest.raises(ValueError, match=r"roles \['solo'\], the environment \['aux', 'main'\]"):
        tiny_team(("solo",)).collaborate("Go.", environment)


def test_collaborate_on_many_items():
    team = tiny_team()
    environment = dialogue("aux", "main")
    items = [{"prompt": text} for text in ("Go.", "Stop here.", "", "Go.")]
    alone = [team.collaborate(item, environment, num_turns=2, temperature=0, max_new_tokens=6) for item in items]
    calls = []
    for agent in team.agents.values():
        agent.register_forward_pre_hook(lambda *_: calls.append(0))
    for given in (items, tuple(items), (item for item in items), Dataset.from_list(items)):
        calls.clear()
        assert team.collaborate(given, environment, num_turns=2, temperature=0, max_new_tokens=6) == alone
        assert len(calls) <= 2 * 2 * 7  # two turns of two agents: a prompt and six tokens each
    split = team.collaborate(items, environment, 2, generation_token_budget=1, temperature=0.0, max_new_tokens=6)
    assert split == alone
    assert (
        team.collaborate([], environment) == []
        and len(team.collaborate(items[:1], environment, max_new_tokens=2)) == 1
    )
    texts = team.collaborate(["Go.", "Stop here."], environment, temperature=0, max_new_tokens=6)
    assert [(turn.joint_action, turn.outcome) for (turn,) in texts] == [
        (turns[0].joint_action, None) for turns in alone[:2]
    ]
    torch.manual_seed(0)
    samples = team.collaborate([items[0]] * 3, environment, temperature=5.0, max_new_tokens=6)
    assert len({turn.joint_action["main"] for (turn,) in samples}) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperatur": 1}, "Unknown argument `temperatur=1`: did you mean `temperature`\\?"),
        ({"max_completion_length": 8}, "Unknown argument `max_completion_length=8`: did you mean `max_new_tokens`\\?"),
        ({"xyz": None}, "Unknown argument `xyz=None`: use a field of"),
        ({"num_turns": 0}, "`num_turns` is 0; it must be a whole number of at least 1"),
        ({"num_turns": 1.5}, "`num_turns` is 1.5"),
        ({"temperature": -1}, "`temperature` is -1; it must be a number from 0"),
        ({"temperature": float("nan")}, "`temperature` is nan"),
        ({"temperature": 0, "do_sample": True}, "which `do_sample=True` contradicts"),
        ({"top_p": 2}, "`top_p` is 2; it must be a number from 0 to 1"),
        ({"top_k": -1}, "`top_k` is -1"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be greater than 0"),
        ({"num_return_sequences": 2}, "`num_return_sequences` cannot be set here: pass an item several times"),
        (
            {"stop_strings": {"x": ["."]}},
            "`stop_strings` is {'x': \\['.'\\]}; it must have lists of texts for aux, main",
        ),
        ({"stop_strings": {"aux": "."}}, "it must have lists of texts for aux, main"),
        ({"stop_strings": {"aux": ["", "."]}}, "it must have lists of texts for aux, main"),
        ({"return_dict_in_generate": True}, "`return_dict_in_generate` cannot be set here"),
        ({"min_length": 9}, "`min_length` cannot be set here: it would count a batch's padding"),
        ({"item": [{"prompt": "Go."}, "Go."]}, "must be a row of the dataset, which is a dict, or a text, or a list"),
        ({"item": ["Go."], "num_turns": 2}, "needs a whole item"),
    ],
)
def test_collaborate_refuses(arguments, message):
    team = tiny_team()
    environment = dialogue("aux", "main")
    with pytest.raises((TypeError, ValueError), match=message) as error:
        team.collaborate(**{"item": {"prompt": "Go."}, "environment": environment, **arguments})
    assert "\n" not in str(error.value)
    assert team.training


def test_an_error_leaves_the_team_in_its_mode():
    team = tiny_team()
    with pytest.raises(TaskError):
        team.collaborate(
            {"prompt": "x"},
            FunctionEnvironment({"aux": "{prompt}", "main": "{prompt}"}, lambda **columns: None),
            max_new_tokens=2,
        )
    assert team.training and team.active == "aux"


def test_sampling_is_at_temperature_one_whatever_the_model_was_saved_with():
    team = tiny_team()
    for agent in team.agents.values():
        agent.generation_config.update(temperature=1e-4, top_k=1, repetition_penalty=1.5)
    torch.manual_seed(0)
    environment = dialogue("aux", "main")
    samples = team.collaborate(["Go."] * 8, environment, max_new_tokens=4)
    assert len({turn.joint_action["main"] for (turn,) in samples}) > 4


def test_collaborate_as_chat():
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    team = tiny_team(chat_template=template)
    environment = dialogue("aux", "main")
    chat = team.collaborate("Go.", environment, do_sample=False, max_new_tokens=6)[0].joint_action["main"]
    ids = team.tokenizers["main"]("<user>main: Go.<assistant>", return_tensors="pt")["input_ids"]
    greedy = team.agents["main"].generate(ids, do_sample=False, max_new_tokens=6)[0, ids.size(1) :]
    assert chat == team.tokenizers["main"].decode(greedy, skip_special_tokens=True)


def test_a_model_in_a_gguf_file_is_trained_and_saved(tmp_path):
    """transformers itself saves no model that it read from such a file."""
    gguf = pytest.importorskip("gguf")
    model, folder = tiny_llama(), tmp_path / "gguf"
    folder.mkdir()
    config = model.config
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
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
        writer.add_tensor(names.get_name(name, (".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    team = AgentTeam.from_pretrained(folder / "model.gguf", ["aux", "main"])
    team.save_pretrained(tmp_path / "team")
    again = AgentTeam.from_pretrained(tmp_path / "team")
    ids = torch.arange(8)[None]
    assert torch.equal(again.agents["main"](ids).logits, team.agents["main"](ids).logits)
    assert torch.equal(again.agents["aux"].get_input_embeddings().weight, model.get_input_embeddings().weight)
    # A saved adapter names the file
    config = {"aux": LoraConfig(target_modules="all-linear")}
    mixed = AgentTeam.from_pretrained(folder / "model.gguf", ["aux", "main"], config)
    mixed.save_pretrained(tmp_path / "mixed")
    again = AgentTeam.from_pretrained(tmp_path / "mixed")
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), mixed.parameters(), strict=True))
    named = AgentTeam.from_pretrained(folder, ["aux"], gguf_file="model.gguf")  # as in a repository
    assert torch.equal(named.agents["aux"](ids).logits, team.agents["aux"](ids).logits)

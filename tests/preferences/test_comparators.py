"""Comparators: who samples the other answer, and what a single model that answers for all roles sees."""

import pytest
import torch

from trl_multiagent import AgentTeam
from trl_multiagent.preferences import PreferenceConfig, collect_preferences, make_comparator
from trl_multiagent.preferences.comparators import sample_centralized
from trl_multiagent.rollout.tree import Node, Samples

from tiny import byte_tokenizer, tiny_environment, tiny_items, tiny_llama, tiny_team


def config(folder, policy, **changes):
    tiny = {"preference_num_candidates": 4, "preference_pairs_per_sample": None, "max_completion_length": 6}
    tiny |= {"output_dir": str(folder), "disable_tqdm": True, "comparator_policy": policy}
    return PreferenceConfig(**{**tiny, **changes})


def collect(folder, policy, team=None, round=0, comparator=None, **changes):
    team = tiny_team() if team is None else team
    settings = config(folder, policy, **changes)
    return collect_preferences(team, tiny_environment(), tiny_items(4), settings, round=round, comparator=comparator)


def test_the_team_itself_samples_other_answers_the_second_time(tmp_path):
    preferences = collect(tmp_path, "current", pair_selection="comparator_reward")
    assert 8 < len(preferences) <= 16
    assert set(preferences["chosen_by"]) == set(preferences["rejected_by"]) == {"current"}
    assert all(row["aux_chosen"] != row["aux_rejected"] for row in preferences)


def test_no_more_answers_than_can_be_paired(tmp_path):
    assert config(tmp_path, "current", comparator_num_candidates=9).num_comparator_candidates == 4


def test_history_is_the_team_of_an_earlier_round(tmp_path):
    teams = [
        AgentTeam({r: tiny_llama(10 * k + i) for i, r in enumerate(("aux", "main"))}, tokenizers()) for k in range(2)
    ]
    for k, team in enumerate(teams):
        team.save_pretrained(tmp_path / f"round_{k}")
    names = {}
    for round, k in ((0, 1), (1, 1), (2, 1), (2, 2), (3, 9)):
        settings = config(tmp_path, "history", policy_checkpoint_dir=str(tmp_path), comparator_history_k=k)
        comparator = make_comparator(tiny_team(), settings, round)
        names[round, k] = comparator.name
        if comparator.name.startswith("history"):
            saved = teams[int(comparator.name[-1])].state_dict()
            assert all(torch.equal(x, saved[name]) for name, x in comparator.sample.team.state_dict().items())
    assert names.pop((0, 1)) == "current" and names.pop((2, 1)) == "history:round_1"
    assert names == dict.fromkeys([(1, 1), (2, 2), (3, 9)], "history:round_0")
    with pytest.raises(ValueError, match="holds no team"):
        make_comparator(tiny_team(), config(tmp_path, "history", policy_checkpoint_dir=str(tmp_path)), 5)
    rows = collect(tmp_path / "rows", "history", round=1, policy_checkpoint_dir=str(tmp_path))
    assert {*rows["chosen_by"], *rows["rejected_by"]} == {"current", "history:round_0"}
    assert all(row["chosen_by"] != row["rejected_by"] for row in rows)


def test_models_get_what_the_chat_templates_of_the_team_get(tmp_path, tiny_model):
    """By role. A saved team has its own."""
    team = tiny_team()
    team.reasoning["main"], team.chat_template_kwargs["main"] = "none", {"effort": "low"}
    settings = config(tmp_path, "model", comparator_model_name=tiny_model)
    sampler = make_comparator(team, settings).sample
    assert [sampler.template_kwargs(role) for role in team.roles] == [{}, {"enable_thinking": False, "effort": "low"}]
    tiny_team().save_pretrained(tmp_path / "team")
    settings = config(tmp_path, "model", comparator_model_name=str(tmp_path / "team"))
    assert make_comparator(team, settings).sample.template_kwargs("main") == {}


def tokenizers():
    return {role: byte_tokenizer() for role in ("aux", "main")}


def test_other_models(tmp_path, tiny_model):
    tiny_team().save_pretrained(tmp_path / "team")
    tiny_team(("left", "right")).save_pretrained(tmp_path / "others")
    for names in (
        {"comparator_model_name": tiny_model},
        {"comparator_model_name": str(tmp_path / "team")},
        {"comparator_agents": [tiny_model, tiny_model]},
    ):
        comparator = make_comparator(tiny_team(), config(tmp_path, "model", **names))
        assert comparator.sample.team.roles == ("aux", "main") and comparator.name.startswith("model:")
        assert not any(parameter.requires_grad for parameter in comparator.sample.team.parameters())
    with pytest.raises(ValueError, match="The comparator cannot be loaded from 'no-such-model'"):
        make_comparator(tiny_team(), config(tmp_path, "model", comparator_model_name="no-such-model"))
    rows = collect(tmp_path / "rows", "model", comparator_model_name=tiny_model)
    assert {*rows["chosen_by"], *rows["rejected_by"]} == {"current", f"model:{tiny_model}"}
    with pytest.raises(ValueError, match=r"has the roles \['left', 'right'\], the team \['aux', 'main'\]"):
        make_comparator(tiny_team(), config(tmp_path, "model", comparator_model_name=str(tmp_path / "others")))


def test_one_model_for_all_roles(tmp_path, tiny_model):
    changes = {"comparator_generation_mode": "centralized", "comparator_model_name": tiny_model}
    rows = collect(tmp_path, "model", **changes)
    assert {*rows["chosen_by"], *rows["rejected_by"]} == {"current", f"model:{tiny_model}:centralized"}
    sample = make_comparator(tiny_team(), config(tmp_path, "model", **changes)).sample
    assert sample.args[0].generator.max_new_tokens == 12  # of all roles


class Scripted:
    """
    Stands in for the sampler of a model: it keeps the prompts, and answers with texts that are written down here.
    """

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def __call__(self, nodes, num_generations):
        self.asked.append([node.prompts["model"] for node in nodes])
        texts = [[self.answer(len(self.asked), k, g) for g in range(num_generations)] for k in range(len(nodes))]
        return {"model": [Samples([1], [[7, 8]] * num_generations, of_node) for of_node in texts]}


def nodes():
    return [Node({}, (), {"aux": f"Help {k}.", "main": [{"role": "user", "content": f"Do {k}."}]}) for k in range(2)]


def test_a_centralized_model_sees_both_assignments_and_answers_in_blocks():
    scripted = Scripted(lambda call, k, g: f"Well.<aux>\nhelp{k}{g}\n</aux> and <main>\n  do{k}{g}")
    samples = sample_centralized(scripted, ("aux", "main"), nodes(), 2)
    (asked,) = scripted.asked
    assert all(f"Help {k}." in asked[k] and f"Do {k}." in asked[k] for k in range(2))
    assert [x.texts for x in samples["aux"]] == [["help00", "help01"], ["help10", "help11"]]
    assert [x.texts for x in samples["main"]] == [["  do00", "  do01"], ["  do10", "  do11"]]
    assert sum(len(ids) for x in samples.values() for y in x for ids in y.completion_ids) == 8  # counted once

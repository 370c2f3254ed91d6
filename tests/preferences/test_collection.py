"""Collection with tiny teams: what is written, interruptions, several processes, forms of team, comparators."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, load_from_disk

from trl_multiagent import FunctionEnvironment, workflow
from trl_multiagent.environments import role_reward
from trl_multiagent.environments.base import scoring_metrics
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.folders import locked
from trl_multiagent.preferences import PreferenceConfig, collect_preferences, load_preferences
from trl_multiagent.preferences.collection import seeded
from trl_multiagent.preferences.rows import check_preferences

from tiny import Workflow, count_reward, team_of, tiny_environment, tiny_items, tiny_team


HELPERS = Path(__file__).parents[1] / "helpers"


def settings(folder, **changes):
    tiny = {"preference_num_candidates": 4, "preference_pairs_per_sample": 3, "max_completion_length": 6}
    tiny |= {"output_dir": str(folder), "items_per_chunk": 5, "disable_tqdm": True}
    return PreferenceConfig(**{**tiny, **changes})


def collect(folder, team=None, environment=None, items=None, round=0, **changes):
    team = tiny_team() if team is None else team
    environment = tiny_environment(team.roles) if environment is None else environment
    items = tiny_items() if items is None else items
    return collect_preferences(team, environment, items, settings(folder, **changes), round=round)


def facts(folder):
    return json.loads((folder / "collection.json").read_text())


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """The collection that others are compared with, and its folder."""
    folder = tmp_path_factory.mktemp("collected") / "preferences"
    return collect(folder), folder


def test_rows_scores_and_accounting(collected):
    preferences, folder = collected
    check_preferences(preferences, ("aux", "main"))
    numbers = facts(folder)["numbers"]
    assert numbers["items"] == 12 and numbers["candidates_scored"] == 48
    assert numbers["pairs"] == len(preferences) and numbers["env_steps"] == 2 * len(preferences)
    assert 0 < numbers["tokens_sampled"] <= 48 * 2 * 6
    assert set(preferences["round"]) == {0} and set(preferences["chosen_by"]) == {"current"}
    assert max(preferences["item_id"].count(k) for k in set(preferences["item_id"])) == 3
    for row in preferences:
        item = tiny_items()[int(row["item_id"])]
        assert row["main_prompt"] == f"Task {item['x']}, part main:"
        for side in ("chosen", "rejected"):
            answer = {role: row[f"{role}_{side}"] for role in ("aux", "main")}
            assert count_reward([answer]) == [row[f"{side}_reward"]] == [row[f"{side}_rewards/count_reward"]]


def test_pairs_are_those_of_the_stored_candidates(collected):
    preferences, folder = collected
    records = [json.loads(line) for path in sorted((folder / "candidates").glob("*.jsonl")) for line in path.open()]
    assert [record["index"] for record in records] == list(range(12))
    for record in records:
        rewards = [candidate["reward"] for candidate in record["candidates"]]
        gaps = sorted((a - b for a in rewards for b in rewards if a > b), reverse=True)
        rows = [row for row in preferences if row["item_id"] == record["item_id"]]
        assert [row["chosen_reward"] - row["rejected_reward"] for row in rows] == gaps[: len(rows)]
        assert len(rows) == min(3, len(gaps))


def test_it_is_an_ordinary_dataset_with_a_card(collected):
    preferences, folder = collected
    assert load_from_disk(folder).to_list() == load_preferences(str(folder), ("aux", "main")).to_list()
    card = (folder / "README.md").read_text()
    assert "| preference_num_candidates | 4 |" in card and "FunctionEnvironment(reward_funcs=[count_reward]" in card
    assert f"| pairs | {len(preferences)} |" in card


class Interrupted(Exception):
    pass


def interrupting(calls):
    """An environment that fails when it scores for the `calls`-th time."""

    def reward(completions, **columns):
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise Interrupted
        return count_reward(completions)

    return tiny_environment(reward=named(reward))


def named(reward):
    reward.__name__ = "count_reward"
    return reward


@pytest.mark.parametrize("calls", [1, 3])
def test_an_interrupted_collection_is_continued_bit_for_bit(collected, tmp_path, calls):
    torch.manual_seed(calls)  # the state of the generators outside does not matter
    with pytest.raises(TaskError, match="Interrupted"):
        collect(tmp_path, environment=interrupting(calls))
    done = sorted(path.name for path in (tmp_path / "candidates").glob("*.jsonl"))
    assert len(done) == calls - 1 and not (tmp_path / "state.json").exists()
    (tmp_path / "candidates" / "_chunk_00002.jsonl_17").write_text('{"index": 1')  # left by a process that was killed
    with pytest.raises(ValueError, match="unfinished collection"):
        load_preferences(str(tmp_path), ("aux", "main"))
    scored = []
    reward = named(lambda completions, **_: scored.extend(completions) or count_reward(completions))
    assert collect(tmp_path, environment=tiny_environment(reward=reward)).to_list() == collected[0].to_list()
    assert len(scored) == 4 * (12 - 5 * (calls - 1))  # what was there is not sampled again


def test_what_is_complete_is_not_collected_again_and_other_settings_are_refused(collected, tmp_path):
    folder = tmp_path / "again"
    shutil.copytree(collected[1], folder)
    nothing = tiny_environment(reward=named(lambda **_: 1 / 0))
    assert collect(folder, environment=nothing).to_list() == collected[0].to_list()
    with locked(folder, ""):  # by another program; what is complete is read
        collect(folder)
    with pytest.raises(ValueError, match=r"another collection: temperature was 1.0, is 0.5\. Choose another folder"):
        collect(folder, temperature=0.5)
    other = tiny_team()
    with torch.no_grad():
        other.agents["main"].lm_head.weight[5, 5] += 1e-3
    with pytest.raises(ValueError, match="weights of the team was"):
        collect(folder, team=other)
    with pytest.raises(
        ValueError, match=r"data types of the weights was \['torch.float32'\], is \['torch.bfloat16'\]"
    ):
        collect(folder, team=tiny_team().bfloat16())
    with pytest.raises(ValueError, match="rows of the dataset was"):
        collect(folder, items=tiny_items().select(range(11, -1, -1)))
    # other pairs of the same candidates need no sampling
    every = collect(folder, environment=nothing, pair_selection="all", preference_pairs_per_sample=None)
    assert len(every) == facts(folder)["numbers"]["pairs_possible"] > len(collected[0])
    assert {row["aux_chosen"] for row in collected[0]} <= {row["aux_chosen"] for row in every}
    (folder / "candidates" / "chunk_00001.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"chunk_00001\.jsonl is damaged"):
        collect(folder, environment=nothing)


def test_two_processes_collect_what_one_does(collected, forked, tmp_path):
    done = forked.run(HELPERS / "two_collectors.py", tmp_path, processes=2)
    assert done.codes == [0, 0], done.stderr[-4000:]
    assert load_from_disk(tmp_path / "whole").to_list() == collected[0].to_list()
    # one process fails: both end, and the collection can be continued
    done = forked.run(HELPERS / "two_collectors.py", tmp_path, 1, processes=2)
    assert 0 not in done.codes and "Process 1" in done.stderr and "ZeroDivisionError" in done.stderr
    assert len(list((tmp_path / "broken" / "candidates").glob("chunk_*"))) == 2
    assert collect(tmp_path / "broken").to_list() == collected[0].to_list()


def test_rounds_and_seeds_differ_and_generators_outside_do_not_change(collected, tmp_path):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    second = collect(tmp_path / "round", round=1)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert set(second["round"]) == {1}
    texts = [set(rows["aux_chosen"]) for rows in (collected[0], second, collect(tmp_path / "seed", seed=1))]
    assert not texts[0] & texts[1] and not texts[0] & texts[2]
    with seeded(3):
        drawn = random.random(), np.random.rand(), torch.rand(1)
    with seeded(3):
        assert drawn == (random.random(), np.random.rand(), torch.rand(1))


@pytest.mark.parametrize("form", ["shared", "lora", "mixed"])
def test_every_form_of_team(form, tmp_path):
    team = team_of(form)
    weights = {name: x.clone() for name, x in team.state_dict().items()}
    preferences = collect(tmp_path, team=team, items=tiny_items(5))
    check_preferences(preferences, team.roles)
    assert team.training and all(torch.equal(x, weights[name]) for name, x in team.state_dict().items())


def test_three_agents_and_chat_templates(tmp_path):
    template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    team = tiny_team(("a", "b", "c"), template)
    preferences = collect(tmp_path / "chat", team=team, items=tiny_items(3))
    check_preferences(preferences, team.roles)
    row = preferences[0]
    assert row["b_prompt"] == [{"role": "user", "content": "Task 1, part b:"}]
    assert row["c_chosen"][0]["role"] == "assistant" and isinstance(row["c_chosen"][0]["content"], str)
    text = collect(tmp_path / "text", team=team, items=tiny_items(3), use_chat_template=False)
    assert text[0]["b_prompt"] == "Task 1, part b:"
    assert text.to_list() != preferences.to_list()


def test_no_pairs_is_a_warning_and_an_empty_dataset(tmp_path, caplog):
    equal = tiny_environment(reward=lambda completions, **_: [1.0] * len(completions))
    preferences = collect(tmp_path, environment=equal)
    assert len(preferences) == 0 and {"aux_prompt", "main_chosen", "item_id"} <= set(preferences.column_names)
    assert "Only 0 of 12 items have answers with different rewards" in caplog.text
    with pytest.raises(ValueError, match="has no rows"):
        load_preferences(str(tmp_path), ("aux", "main"))


def test_rewards_are_processed_and_components_keep_their_names(tmp_path):
    def reward(completions, **columns):
        return count_reward(completions)

    environment = FunctionEnvironment({"solo": "Say {x}:"}, [named(reward), reward])
    environment.reward_names = ["by", "reward"]  # as columns, these would be `chosen_rewards/by`
    items = Dataset.from_dict({"x": ["1", "2", "3"], "task_id": ["a", "b", "c"]})
    preferences = collect(tmp_path, tiny_team(("solo",)), environment, items, reward_scale=0.5, reward_shift=-1.0)
    for row in preferences:
        assert row["chosen_reward"] == pytest.approx(0.5 * 2 * row["chosen_rewards/by"] - 1.0)
        assert row["item_id"] in "abc"


class Stateful(FunctionEnvironment):
    """Rewards that depend on how often the environment has scored."""

    def __init__(self):
        super().__init__({"aux": "Task {x}:", "main": "Do {x}:"}, count_reward)
        self.calls, self.fail_at = 0, None

    def score(self, items, joint_actions, histories):
        self.calls += 1
        if self.calls == self.fail_at:
            raise Interrupted
        outcomes = super().score(items, joint_actions, histories)
        for k, outcome in enumerate(outcomes):
            outcome.reward += 0.01 * self.calls * (k % 3)
            outcome.metrics["reward"] = 7.0  # the column `chosen_reward` is taken
        return outcomes

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_an_environment_with_a_state_continues_with_it(tmp_path):
    whole = collect(tmp_path / "whole", environment=Stateful())
    broken = Stateful()
    broken.fail_at = 3
    with pytest.raises(TaskError):
        collect(tmp_path / "broken", environment=broken)
    assert collect(tmp_path / "broken", environment=Stateful()).to_list() == whole.to_list()
    assert set(whole["chosen_metric_reward"]) == {7.0}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"preference_num_candidates": 1}, "`preference_num_candidates` is 1; it must be at least 2"),
        ({"pair_selection": "best"}, "it must be 'reward_gap', 'random', 'all' or 'comparator_reward'"),
        ({"pair_selection": "all"}, "set `preference_pairs_per_sample` to null"),
        ({"pair_selection": "comparator_reward"}, "needs a comparator"),
        ({"comparator_policy": "history"}, "needs `policy_checkpoint_dir`"),
        ({"comparator_policy": "model"}, "needs either `comparator_model_name` or `comparator_agents`"),
        ({"comparator_generation_mode": "centralized"}, "set `comparator_policy: model`"),
        ({"comparator_policy": "api"}, "needs `comparator_api_model`"),
    ],
)
def test_impossible_settings(changes, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        settings(tmp_path, **changes)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("", "The prompt of 'main' for item 2 is empty"),
        ([{"role": "user", "content": ""}], "The prompt of 'main' for item 2 is empty"),
        ([{"role": "assistant", "content": "So"}], "prompt of 'main' for item 2 ends with a message of the assistant"),
    ],
)
def test_prompts_are_checked_before_anything_is_sampled(prompt, problem, tmp_path):
    template = None if prompt == "" else "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    prompts = {"aux": "Help {x}:", "main": lambda item: prompt if item["x"] == "100" * 3 else "Do:"}
    environment = FunctionEnvironment(prompts, named(lambda **_: 1 / 0))
    with pytest.raises(ValueError, match=problem):
        collect(tmp_path, tiny_team(chat_template=template), environment)
    assert list((tmp_path / "candidates").glob("chunk*")) == []


def test_messages_with_other_keys_and_texts_in_between(tmp_path):
    message = {"role": "user", "content": "Help <eos>:", "name": "bob"}
    prompts = {"aux": lambda item: [message] if item["x"] == "1" else message["content"], "main": "Do {x}:"}
    environment = FunctionEnvironment(prompts, count_reward)
    team = tiny_team(chat_template="{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    preferences = collect(tmp_path, team, environment)
    assert {json.dumps(prompt) for prompt in preferences["aux_prompt"]} == {
        '[{"role": "user", "content": "Help < eos>:"}]'  # as the agent read it
    }


def test_reward_functions_get_chat_messages_as_in_a_training_and_counts_end_with_the_collection(tmp_path):
    scored = []

    def of_trl(prompts, completions, **columns):
        scored.extend(completions)
        return [
            float(len(prompt[-1]["content"] + reply[0]["content"]))
            for prompt, reply in zip(prompts, completions, strict=True)
        ]

    environment = tiny_environment(reward=role_reward("main", of_trl))

    def metrics():
        number = len(scored)
        scored.clear()
        return {"scored": number}

    environment.metrics = metrics
    team = tiny_team(chat_template="{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    assert len(collect(tmp_path, team, environment, tiny_items(2))) > 0
    assert scoring_metrics(environment) == {"scored": 0.0}  # a training logs its own


def test_ranks_among_the_answers_of_one_policy_are_not_compared_with_those_of_another(tmp_path):
    @workflow(roles=("solo",), group_reward=lambda item, episodes: [float(k) for k in range(len(episodes))])
    async def ranked(item, agents):
        return float(len(await agents.solo(item["x"])))

    with pytest.raises(ValueError, match="`group_reward` compares the answers of one policy"):
        collect(tmp_path, tiny_team(("solo",)), ranked, comparator_policy="current")
    assert len(collect(tmp_path, tiny_team(("solo",)), ranked, tiny_items(2))) > 0


def test_arguments_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match=r"The team has the roles \['a', 'b'\], the environment \['aux', 'main'\]"):
        collect(tmp_path, team=tiny_team(("a", "b")), environment=tiny_environment())
    with pytest.raises(ValueError, match="has no items"):
        collect(tmp_path, items=tiny_items().select([]))
    with pytest.raises(TypeError, match=r"must be a `datasets\.Dataset`, got `list`"):
        collect(tmp_path, items=[{"x": "1"}])


def test_roles_that_do_not_act_and_rewards_of_their_own(tmp_path, monkeypatch):
    """The first is refused before anything is sampled."""
    per_role = named(lambda completions, **_: [{"aux": 1.0, "main": float(k)} for k in range(len(completions))])
    own = tiny_environment(reward=per_role)
    with pytest.raises(ValueError, match="one joint reward, but the environment gives each role its own"):
        collect(tmp_path / "own", environment=own)
    monkeypatch.setattr("trl_multiagent.rollout.sampler.TeamSampler.sample", None)
    with pytest.raises(
        ValueError, match="A preference needs the answers of all roles in every turn, but main does not act"
    ):
        collect(tmp_path / "idle", environment=Workflow())

"""
`collaboration_mode: centralized`: one agent that answers for all roles, as a control beside a team and a single agent.
"""

import asyncio
import json
from pathlib import Path

import pandas
import pytest

from trl_multiagent import AgentTeam, FunctionEnvironment, Outcome, Task, role_reward, workflow
from trl_multiagent.environments.base import ScoringContext, Turn, ask, judge, scoring
from trl_multiagent.environments.centralized import CentralizedEnvironment, central_prompt, split_blocks
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.preferences.comparators import sample_centralized
from trl_multiagent.rollout.tree import Node
from trl_multiagent.runs.rounds import PreferenceRun
from trl_multiagent.runs.run import read_settings, run_recipe

from prepared import parse_recipe
from tiny import Workflow, tiny_items, tiny_task


PROMPT = """You answer for the roles aux, main, who solve one task together.

<assignment of aux>
Help with it.
</assignment of aux>

<assignment of main>
Be brief.

Do it.
</assignment of main>

Write the answers of all roles, each in its tags and with nothing else:
<aux>
answer of aux
</aux>
<main>
answer of main
</main>

"""
SMALL = (
    "--num_generations 2 --max_completion_length 8 --items_per_device 2 --max_steps 2 --logging_steps 1 "
    "--disable_tqdm "
)
SMALL += "--report_to none --save_strategy steps --save_steps 1"
PAIRS = "--preference_num_candidates 4 --preference_pairs_per_sample 2 --max_completion_length 8 --disable_tqdm "
PAIRS += "--per_device_train_batch_size 4 --max_steps 2 --report_to none"
seen = []  # what the reward got


def reward(completions, prompts, **columns):
    seen.extend(zip(prompts, completions, strict=True))
    return [float(len(one["aux"]) + sum(map(ord, str(one["main"])))) % 7 for one in completions]


def environment(reward=reward):
    return FunctionEnvironment({"aux": "Help with {x}:", "main": "Do {x}:"}, reward)


TASK = Task(lambda settings: environment(), lambda settings: (tiny_items(6), tiny_items(2)))


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen.clear()


def test_the_prompt_is_the_same_for_a_team_and_a_comparator():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Do it.\n"}]
    prompts = {"aux": "Help with it.", "main": chat}
    assert central_prompt(["aux", "main"], prompts) == PROMPT
    asked = []
    sample_centralized(
        lambda nodes, number: asked.extend(nodes) or {"model": []}, ("aux", "main"), [Node({}, (), prompts)], 2
    )
    assert asked[0].prompts == {"model": PROMPT}


@pytest.mark.parametrize(
    ("text", "aux", "main", "missing", "doubled"),
    [
        ("<aux>\na\n</aux>\n<main>\nb\n</main>", "a", "b", [], []),
        ("Sure!\n<main>b</main> and <aux>a</aux> done", "a", "b", [], []),  # any order, text around
        ("<aux>\n\n  a\n\n</aux><main>\n  b", "\n  a\n", "  b", [], []),  # cut off
        ("<aux>\na\n<main>\nb\n</main>", "a", "b", [], []),  # the end of the first block is missing
        ("<aux>x = '<main>'</aux><main>b</main>", "x = '<main>'", "b", [], []),  # a tag in an answer
        ("<aux>a</aux>", "a", "", ["main"], []),
        ("<aux>a</aux><main>b</main><main>c</main>", "a", "", [], ["main"]),
        ("no tags", "", "", ["aux", "main"], []),
        ("</aux>a<aux></main><main>", "</main>", "", [], []),
        ("<AUX>a</AUX><main >b</main>", "", "", ["aux", "main"], []),
    ],
)
def test_blocks(text, aux, main, missing, doubled):
    blocks = split_blocks(text, ["aux", "main"])
    assert blocks.answers == {"aux": aux, "main": main}
    assert (blocks.missing, blocks.doubled) == (missing, doubled)


def test_the_work_for_blocks_without_an_end_grows_with_the_length():
    assert split_blocks("<aux>" * 100_000, ["aux", "main"]).doubled == ["aux"]  # in quadratic time this takes hours


def test_the_task_gets_the_answers_and_the_prompts_of_its_roles():
    central = CentralizedEnvironment(environment())
    assert central.roles == ("team",) and isinstance(central.unwrapped, FunctionEnvironment)
    items = [{"x": "one"}, {"x": "two"}]
    prompts = ask(central, items, [(), ()])
    assert prompts[1]["team"] == central_prompt(["aux", "main"], {"aux": "Help with two:", "main": "Do two:"})
    actions = [{"team": "<aux>a</aux><main>b</main>"}, {"team": "<main>b</main><main>b</main>"}]
    with scoring(ScoringContext(prompts=prompts, completion_ids=[{"team": [1]}] * 2)):
        outcomes = judge(central, items, actions, [(), ()])
    assert seen == [
        ({"aux": "Help with one:", "main": "Do one:"}, {"aux": "a", "main": "b"}),
        ({"aux": "Help with two:", "main": "Do two:"}, {"aux": "", "main": ""}),
    ]
    assert [outcome.reward for outcome in outcomes] == [(1 + 98) % 7, 0]
    assert [outcome.metrics["missing_blocks"] for outcome in outcomes] == [0, 1]
    assert [outcome.metrics["doubled_blocks"] for outcome in outcomes] == [0, 1]
    assert outcomes[0].extra == {"answer/aux": "a", "answer/main": "b"}
    # Reward functions in TRL's form get messages
    spy = role_reward("main", lambda completions, **columns: seen.append(completions) or [0.0])
    central = CentralizedEnvironment(environment(spy))
    with scoring(ScoringContext(prompts=prompts, chat_roles=frozenset({"team"}))):
        judge(central, items[:1], actions[:1], [()])
    assert seen[-1] == [[{"role": "assistant", "content": "b"}]]


def test_the_group_reward_of_a_task_reads_the_answers_of_its_roles():
    def length(item, episodes):
        return [float(len(history[0].joint_action["aux"])) for history in episodes]

    @workflow(roles=("aux", "main"), group_reward=length)
    async def task(item, agents):
        await asyncio.gather(agents.aux("Go:"), agents.main("Go:"))
        return 0.0

    turn = Turn({"team": "Both:"}, {"team": "<aux>abc</aux><main>b</main>"}, Outcome(0.0))
    assert CentralizedEnvironment(task).group_rewards({}, [(turn,)]) == [3.0]


def test_one_turn_and_several_roles():
    central = CentralizedEnvironment(environment())
    with pytest.raises(ValueError, match="plays one turn"):
        central.check_turns(2)
    with pytest.raises(ValueError, match="plays one turn"):
        central.next_prompts([{"x": "one"}], [("a past turn",)])
    with pytest.raises(
        TaskError, match="One model for all roles needs the answers of all roles in every turn, but main does"
    ):
        CentralizedEnvironment(Workflow()).next_prompts([{"x": "1"}], [()])
    with pytest.raises(ValueError, match="has a single role"):
        CentralizedEnvironment(FunctionEnvironment({"main": "Do {x}:"}, reward))
    assert Outcome(1.0).metrics == {}


def test_settings():
    argv = ["--model_name", "m", "--collaboration_mode", "centralized", "--joint_mode", "cross"]
    args = parse_recipe("magrpo", TASK, argv, "run").training_args
    assert args.num_agents == 1 and args.joint_actions_per_node == args.num_generations
    argv = ["--model_name", "m", "--collaboration_mode", "centralized", "--comparator_generation_mode", "centralized"]
    argv += ["--comparator_policy", "model", "--comparator_model_name", "n"]
    run = PreferenceRun(read_settings("marlhf", TASK, argv, "run"))
    assert run.preferences.comparator_generation_mode == "decentralized"
    assert run.prepared.make_environment().roles == ("team",)


def test_magrpo_trains_one_agent_for_all_roles(tiny_model, capsys):
    argv = ["--model_name", tiny_model, "--output_dir", "run", *SMALL.split(), "--collaboration_mode", "centralized"]
    argv += ["--eval_strategy", "steps", "--eval_steps", "2"]
    run_recipe("magrpo", TASK, [*argv, "--dry_run"], "run")
    assert "one agent answers for all 2 roles, in 8 tokens" in capsys.readouterr().out
    run_recipe("magrpo", TASK, [*argv, "--trace_steps", "1"], "run")
    assert [path.name for path in Path("run/agents").iterdir()] == ["team"]
    team = AgentTeam.from_pretrained("run")
    (turn,) = team.collaborate({"x": "one"}, CentralizedEnvironment(environment()))
    assert "<assignment of aux>\nHelp with one:" in turn.prompts["team"]
    history = json.loads(Path("run/checkpoint-2/trainer_state.json").read_text())["log_history"]
    log = next(entry for entry in history if "reward" in entry)
    assert log["turn_1/missing_blocks"] == 2 and log["turn_1/doubled_blocks"] == 0 and log["env_step"] == 4
    assert any("eval_turn_1/missing_blocks" in entry for entry in history)
    assert "CentralizedEnvironment(" in Path("run/README.md").read_text()
    (table,) = sorted(Path("run").rglob("*.parquet"))[:1]
    assert {"completion/team", "extra/answer/aux", "extra/answer/main"} <= set(pandas.read_parquet(table).columns)


def test_preferences_are_about_the_whole_answer(tiny_model):
    argv = ["--model_name", tiny_model, "--output_dir", "run", *PAIRS.split(), "--collaboration_mode", "centralized"]
    task = tiny_task(6, reward=lambda completions, **_: [len(seen.append(one) or seen) % 5 for one in completions])
    run_recipe("madpo", task, argv, "run")
    results = json.loads(Path("run/results.json").read_text())
    assert results["collection"]["candidates_scored"] == 24 and Path("run/agents/team").is_dir()

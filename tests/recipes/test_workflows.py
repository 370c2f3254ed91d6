"""The recipes of workflows: their rewards, their demonstrations, and what is sampled and trained."""

import asyncio
import copy
import random
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from trl_multiagent import AgentTeam, Turn, cli, workflow
from trl_multiagent.configs.recipes.code_generation import in_order
from trl_multiagent.configs.recipes.games import planning
from trl_multiagent.configs.recipes.workflows import (
    debate_judge,
    demos,
    evaluator_optimizer,
    orchestrator_workers,
    program_repair,
    solver_critic,
    voting,
    writer_editor,
)
from trl_multiagent.environments.base import judge
from trl_multiagent.environments.task import TaskSettings
from trl_multiagent.report.trace_files import read_trace

from prepared import parse_recipe
from tiny import FORMS, team_of, tiny_trainer


WORKFLOWS = {"writer_editor": writer_editor, "solver_critic": solver_critic, "debate_judge": debate_judge}


def play(environment, item, *said):
    """Returns the outcomes of an episode with these joint actions, whose roles must be those that are asked."""
    history = []
    for joint_action in said:
        prompts = environment.prompts(item, history)
        assert list(prompts) == list(joint_action)
        (outcome,) = judge(environment, [item], [joint_action], [history])
        history.append(Turn(prompts, joint_action, outcome))
    assert environment.prompts(item, history) == {}
    return [turn.outcome for turn in history]


@pytest.mark.parametrize(
    ("sentence", "reward"),
    [
        ("The fox sings in the tower.", 1.0),
        ("The fox sleeps in the tower. ", 2 / 3),
        ("The sings fox in the tower.", 1 / 3),
        ("the fox sings in the tower.", 0.0),
        ("The fox sings in the tower", 0.0),
        ("The fox sings in the tower. The fox sings in the tower.", 0.0),
        ("fox sings tower", 0.0),
    ],
)
def test_the_reward_of_a_final_sentence(sentence, reward):
    item = {"noun": "fox", "verb": "sings", "place": "tower"}
    first, last = play(writer_editor.writer_editor, item, {"writer": "any draft"}, {"editor": sentence})
    assert first.reward == 0.0 and last.reward == pytest.approx(reward) and not last.role_rewards


@pytest.mark.parametrize(
    ("answers", "rewards"),
    [
        ([" 5\n", "5"], (1.0, 1.5)),  # confirmed, so that the episode ends
        (["4", "4"], (0.0, 0.0)),
        (["4", "5", "5"], (1.0, 1.5)),
        (["4", "5", "4"], (0.0, 0.5)),
        (["5", "6", "5"], (1.0, 1.0)),
        (["5", "", "no"], (0.0, 0.0)),
    ],
)
def test_the_rewards_of_a_solver_and_a_critic(answers, rewards):
    said = [{role: text} for role, text in zip(("solver", "critic", "solver"), answers, strict=False)]
    outcomes = play(solver_critic.solver_critic, {"a": 2, "b": 3}, *said)
    paid = tuple(sum(x.role_rewards.get(role, x.reward) for x in outcomes) for role in ("solver", "critic"))
    assert paid == rewards and outcomes[1].metrics["confirmed"] == (answers[1].strip() == answers[0].strip())


@pytest.mark.parametrize(
    ("verdict", "rewards"), [("Pro ", (1.0, -1.0, 1.0)), ("con", (-1.0, 1.0, 0.0)), ("both", (0.0, 0.0, 0.0))]
)
def test_the_rewards_of_a_debate(verdict, rewards):
    environment = debate_judge.debate_judge
    item = {"dice": [6, 4, 1]}
    first, last = play(environment, item, {"pro": "6", "con": " 2"}, {"judge": verdict})
    assert first.reward == 0.0 and first.metrics == {"true_dice": 0.5}
    assert tuple(last.role_rewards.values()) == rewards
    shown = environment.prompts(item, [Turn(environment.prompts(item, ()), {"pro": "6", "con": " 2"}, first)])["judge"]
    assert "names a 6." in shown and "names a ?." in shown  # no die shows a 2


def test_an_evaluator_sends_a_writer_back():
    item = {"noun": "fox", "verb": "sings", "place": "tower"}
    said = [{"writer": "The fox sings"}, {"evaluator": "tower"}, {"writer": "A fox sings in the tower"}]
    outcomes = play(evaluator_optimizer.evaluator_optimizer, item, *said, {"evaluator": "none"})
    assert [x.metrics["passed"] for x in outcomes[1::2]] == [0.0, 1.0]
    paid = [sum(x.role_rewards.get(role, x.reward) for x in outcomes) for role in ("writer", "evaluator")]
    assert paid == pytest.approx([1.0, 2 / 3])


@pytest.mark.parametrize(("votes", "reward"), [("5 5 5", 1), ("5 4 5", 1), ("4 5 4", 0), ("5 4 6", 0)])
def test_a_majority_decides(votes, reward):
    said = dict(zip(voting.ROLES, votes.split(), strict=True))
    (outcome,) = play(voting.voting, {"a": 2, "b": 3}, said)
    assert outcome.reward == reward and outcome.metrics["right_votes"] == votes.count("5") / 3


def test_a_fixer_sees_the_test_that_failed():
    (item,), environment = program_repair.wishes()[1], program_repair.program_repair
    right, wrong = ({"coder": f"def f(a, b):\n    return {text}\n"} for text in ("max(a, b)", "a"))
    assert play(environment, item, right)[-1].reward == 1.0
    first, last = play(environment, item, wrong, {"fixer": right["coder"]})
    assert first.reward == 0.0 and last.reward == 1.0
    shown = environment.prompts(item, [Turn(environment.prompts(item, ()), wrong, first)])["fixer"]
    assert "This test fails: assert f(3, 9) == 9" in shown


@pytest.mark.parametrize("prompts", [[], ["prompt_files.main"], ["prompt_files.aux", "prompt_files.main"]])
def test_main_reads_the_helper(prompts):
    given = ["agent_model.name=demo", "dataset.name=demo", "reward.kind=earned"]
    places = [f"{key}=trl_multiagent.configs.recipes.code_generation.prompts:list_{key[13:]}" for key in prompts]
    recipe = parse_recipe("magrpo", in_order.TASK, ["--override", *given, *places])
    environment = in_order.TASK.make_environment(TaskSettings(recipe.sections, 2, Path()))
    item = {"prompt": 'def total(xs):\n    """Sum the doubles of odd numbers."""\n', "entry_point": "total"}
    cases = {(1, 2, 3): 8, (5, 4): 10, (7, 9, 2): 32, (3,): 6}
    tests = "".join(f"    assert candidate({[*xs]}) == {total}\n" for xs, total in cases.items())
    item |= {"task_id": "0", "test": f"def check(candidate):\n{tests}"}
    helper = {"aux": "def aux(xs):\n    return [x for x in xs if x % 2]"}
    first, last = play(environment, item, helper, {"main": "def total(xs):\n    return sum(2 * x for x in aux(xs))"})
    assert first.reward == 0.0 and last.reward == last.metrics["paper_reward"] == 4.0
    assert environment.metrics()["sandbox/suspicious"] == 0
    shown = environment.prompts(item, [Turn(environment.prompts(item, ()), helper, first)])["main"]
    questions = [message["content"] for message in shown[::2]] if prompts else [shown]
    assert helper["aux"] in questions[-1]
    if len(prompts) != 1:  # if only main's prompt has solved problems, they have no helpers
        assert all(text.count("def aux(xs)") == 1 for text in questions)


def test_workers_get_the_parts_of_the_orchestrator():
    environment, item = orchestrator_workers.orchestrator_workers, {"numbers": [1, 2, 3, 4]}
    said = [{"orchestrator": "1 + 2\n3 + 4\n"}, {"worker_1": "3", "worker_2": " 7\n"}, {"orchestrator": "10"}]
    assert play(environment, item, *said)[-1].reward == 1.0
    (first,) = play(environment, item, *said[:1], {"worker_1": "", "worker_2": ""}, {"orchestrator": "9"})[:1]
    history = [Turn(environment.prompts(item, ()), said[0], first)]
    assert [x.split(" = ")[0] for x in environment.prompts(item, history).values()] == ["1 + 2", "3 + 4"]


@pytest.mark.parametrize(
    ("plan", "moves", "reward"),
    [("down, down", "right", 1.0), ("", "down right down", 0.0), ("right", "left down down right", 3 / 5)],
)
def test_a_path_is_paid_by_its_length(plan, moves, reward):
    item = {"grid": ["S..#", ".#..", ".G..", "...."], "shortest": 3}
    assert planning.distance(item["grid"]) == 3
    first, last = play(planning.path, item, {"planner": plan}, {"mover": moves})
    assert first.reward == 0.0 and last.reward == pytest.approx(reward if plan else 0.0)


def test_a_sudoku_takes_out_what_clashes():
    (item,) = planning.sudokus(1, random.Random(3))
    cells, solution = item["cells"], item["solution"]
    k = cells.index("0")
    wrong = solution[:k] + next(x for x in "1234" if x != solution[k]) + solution[k + 1 :]
    assert planning.read(cells, solution) == solution and planning.read(cells, wrong)[k] == "0"
    assert [*planning.solutions(cells)] == [solution]
    assert play(planning.sudoku, item, {"filler": wrong}, {"finisher": solution})[-1].reward == 1.0
    assert play(planning.sudoku, item, {"filler": solution}, {"finisher": wrong})[-1].reward < 1.0


@pytest.mark.parametrize(
    ("task", "turns"),
    [
        ("workflows.evaluator_optimizer:TASK", 2),
        ("workflows.voting:TASK", 1),
        ("workflows.orchestrator_workers:TASK", 3),
        ("workflows.program_repair:TASK", 2),
        ("games.planning:PATH", 2),
        ("games.planning:SUDOKU", 2),
    ],
)
def test_tasks_without_a_configuration_train(task, turns, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--model_name", tiny_model, "--max_steps", "1", "--items_per_device", "2", "--num_generations", "2"]
    small += ["--max_completion_length", "4", "--disable_tqdm", "--report_to", "none", "--num_turns", str(turns)]
    cli.main(["run", "magrpo", "--task", f"trl_multiagent.configs.recipes.{task}", *small, "--output_dir", "run"])
    assert len(AgentTeam.from_pretrained("run").roles) > 1


def test_demonstrations_have_the_prompts_that_agents_get():
    """Those of a solver's second answer contain its first one, as the sampler writes it."""
    first = "2 + 3 = ? Answer with a number only:\n"
    checked = "2 + 3 = 4 ? Repeat the number if it is right, else write the right one:\n"
    (pairs,) = demos.transcripts(solver_critic.solver_critic, [({"a": 2, "b": 3}, ("4", "5", "5"))])
    assert pairs == [(first, "4"), (checked, "5"), (f"{first}4\n\nA critic says 5. Answer again:\n", "5")]
    for recipe, demonstrate in (
        (writer_editor.writer_editor, demos.careless_writing),
        (solver_critic.solver_critic, demos.careless_sums),
        (debate_judge.debate_judge, demos.careless_debates),
    ):
        assert len(demonstrate(recipe, 20, random.Random(0))) == 20


@pytest.mark.parametrize("name", WORKFLOWS)
def test_recipes_train_offline(name, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--model_name", tiny_model, "--max_steps", "2", "--items_per_device", "2", "--num_generations", "2"]
    small += ["--max_completion_length", "4", "--trace_steps", "1", "--disable_tqdm"]
    cli.main(["run", "magrpo", "--config", name, *small, "--output_dir", "run"])
    task = WORKFLOWS[name].TASK
    assert AgentTeam.from_pretrained("run").roles == tuple(task.roles)
    trace = read_trace("run/trace")
    acted = {
        turn: [role for role in task.roles if rows[f"completion/{role}"].notna().all()]
        for turn, rows in trace.groupby("turn")
    }
    expected = {
        "writer_editor": {1: ["writer"], 2: ["editor"]},
        "solver_critic": {1: ["solver"], 2: ["critic"], 3: ["solver"]},
        "debate_judge": {1: ["pro", "con"], 2: ["judge"]},
    }[name]
    assert acted == expected
    written = trace[[f"completion/{role}" for role in task.roles]].notna().sum().sum()
    assert written == sum(len(expected[turn]) for turn in trace["turn"])


@workflow(roles=("pro", "con", "judge"))
async def decided(item, agents):
    """A debate whose judge may write anything."""
    await asyncio.gather(agents.pro(f"For {item['x']}:"), agents.con(f"Against {item['x']}:"))
    won = 1.0 - 2 * (sum((await agents.judge("Who is right?")).encode()) % 2)
    return {"pro": won, "con": -won, "judge": max(won, 0.0)}


@pytest.mark.parametrize("form", FORMS)
def test_a_debate_trains_in_every_form_of_team(tmp_path, form):
    team, roles = team_of(form, decided.roles), decided.roles
    frozen = [] if team.has_shared_weights else ["con"]
    before = copy.deepcopy(team)
    settings = {"num_turns": 2, "max_steps": 2, "frozen_agents": frozen}
    items = Dataset.from_list([{"x": str(k)} for k in range(8)])
    trainer = tiny_trainer(tmp_path, team, decided, train_dataset=items, **settings)
    trainer.train()
    (log,) = (x for x in trainer.state.log_history if x.get("step") == 1 and "reward" in x)
    assert log["agents/pro/return"] == -log["agents/con/return"]
    assert log["return"] == pytest.approx(log["agents/judge/return"] / 3)
    for node in trainer._turns[0]:
        assert node.role_returns["pro"] == [-x for x in node.role_returns["con"]]
        shares = [sum(child.role_rewards["pro"]) / 4 for child in node.children.values()]
        assert node.role_returns["pro"] == pytest.approx(shares)

    changed = {id(x) for x, y in zip(team.parameters(), before.parameters(), strict=True) if not torch.equal(x, y)}
    own = {role: {id(x) for x in team.agent_parameters(role)} for role in roles}
    assert changed <= set().union(*(own[role] for role in roles if role not in frozen))
    assert all(own[role] & changed for role in roles if role not in frozen)

"""The rows of the trace, its files, and what is shown of it. No test here needs a trainer."""

import json
import random
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from trl_multiagent import Environment, Outcome
from trl_multiagent.environments.base import item_id
from trl_multiagent.environments.task_errors import TaskError, task_code
from trl_multiagent.report.run_page import choose_trees, trees_of
from trl_multiagent.report.terminal import print_completions
from trl_multiagent.report.trace_files import Trace, as_frame, read_trace, remove_after, trace_files, write_rows
from trl_multiagent.rollout.trace import trace_rows
from trl_multiagent.rollout.tree import Samples, acting, grow_trees, judge_nodes
from trl_multiagent.settings.read import fail
from trl_multiagent.trainers.magrpo_trainer import sibling_advantages

from tiny import Workflow


class Lengths(Environment):
    """The reward of a joint action is the length of its texts, plus a tenth of the turn."""

    roles = ("aux", "main")

    def prompts(self, item, history):
        asked = f"{item['ask']}{len(history)}"
        return {"aux": asked, "main": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}]}

    def score(self, items, joint_actions, histories):
        outcomes = []
        for action, history in zip(joint_actions, histories, strict=True):
            reward, metrics = sum(map(len, action.values())) + len(history) / 10, {"parts/aux": len(action["aux"])}
            outcomes.append(Outcome(reward, metrics, extra={"verdict": torch.tensor(1.0) if history else "short"}))
        return outcomes


ROLES = ("aux", "main")


def grow(items=({"ask": "Go", "id": 7}, {"ask": "Stop"}), num_generations=2, text="x\n", **settings):
    def sample(nodes, number):
        texts = {"aux": [text * (g + 1) for g in range(number)], "main": ["y" * (2 - g % 2) for g in range(number)]}
        return {role: [Samples([1], [[1]] * number, texts[role]) for _ in nodes] for role in texts}

    settings = {"num_turns": 2, "discount": 0.5, "num_generations": num_generations, **settings}
    environment = Lengths()
    return grow_trees(list(items), environment, sample, lambda x: judge_nodes(environment, x), **settings)


def advantages(turns, mode="mean", roles=("aux", "main")):
    def of_node(node):
        returns = torch.tensor([node.agent_returns(role) for role in roles])
        return dict(zip(roles, sibling_advantages(returns, mode), strict=True))

    return [[of_node(node) for node in nodes] for nodes in turns]


def rows_of(turns=None, **settings):
    turns = grow() if turns is None else turns
    return trace_rows(turns, ROLES, advantages(turns), **{"step": 3, **settings})


def test_a_row_per_joint_action():
    rows = rows_of(process=1)
    assert [(row["tree"], row["node"], row["parent"], row["turn"], row["action"]) for row in rows] == [
        *[(tree, "/", "", 1, action) for tree in (0, 1) for action in (0, 1)],
        *[(tree, f"/{a}", "/", 2, action) for tree in (0, 1) for a in (0, 1) for action in (0, 1)],
    ]
    assert {row["item"] for row in rows if row["tree"] == 0} == {"7"}
    assert len({row["item"] for row in rows}) == 2
    second = rows[1]
    assert (second["step"], second["split"], second["process"]) == (3, "train", 1)
    assert (second["prompt/aux"], second["prompt/main"]) == ("Go0", "[system] Be brief.\n\n[user] Go0")
    assert (second["completion/aux"], second["completion/main"]) == ("x\nx\n", "y")
    assert second["reward"] == second["metrics/parts/aux"] + 1 == 5.0
    assert second["return"] == pytest.approx(5.0 + 0.5 * (4.1 + 5.1) / 2)
    assert second["extra/verdict"] == "short" and rows[4]["extra/verdict"] == "tensor(1.)"
    json.dumps(rows)


def test_frozen_agents_and_evaluations_have_no_advantage():
    turns = grow()
    rows = trace_rows(turns, ROLES, advantages(turns, roles=("main",)), step=1)
    assert {row["advantage/aux"] for row in rows} == {None} and None not in {row["advantage/main"] for row in rows}
    rows = trace_rows(turns, ROLES, step=1, split="eval_hard")
    assert {(row["split"], row["advantage/main"]) for row in rows} == {("eval_hard", None)}


def test_items_have_ids():
    assert [item_id({"id": 3}), item_id({"id": 3, "task_id": "HumanEval/1"})] == ["3", "HumanEval/1"]
    assert item_id({"a": 1, "b": [object]}) == item_id({"b": [object], "a": 1}) != item_id({"a": 2, "b": [object]})


def test_the_reward_of_a_role_is_there_in_turns_that_pay_all_alike():
    turns = grow(num_generations=1)
    turns[1][0].outcomes[0].set_role_rewards({"aux": 1.0, "main": 3.0})
    turns[1][0].role_rewards = {"aux": [1.0], "main": [3.0]}
    for node in (turns[0][0], turns[1][0]):
        node.role_returns = {"aux": [0.0], "main": [0.0]}
    found = [(row["turn"], row["reward/main"]) for row in trace_rows(turns, ROLES, step=1) if "reward/main" in row]
    assert found == [(1, turns[0][0].rewards[0]), (2, 3.0)]


# Files


def arguments(folder, process=0, steps=1, max_files=10):
    return SimpleNamespace(output_dir=folder, process_index=process, trace_steps=steps, trace_max_files=max_files)


def add(trace, step):
    trace.rows += rows_of(step=step, process=trace.args.process_index)
    trace.on_step_end(trace.args, SimpleNamespace(global_step=step), None)


def test_files_hold_all_rows_and_are_bounded(tmp_path):
    traces = [Trace(arguments(tmp_path, process, 2, max_files=3)) for process in (0, 1)]
    for step in range(1, 10):
        for trace in traces:
            add(trace, step)
    for trace in traces:
        trace.on_checkpoint()
    names = [path.name for path in trace_files(tmp_path / "trace")]
    steps = ("00000005-00000006", "00000007-00000008", "00000009-00000009")
    assert names == [f"{some}_process{process}.parquet" for some in steps for process in (0, 1)]
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == sorted(names)
    trace = read_trace(tmp_path / "trace")
    expected = as_frame([row for step in range(5, 10) for k in (0, 1) for row in rows_of(step=step, process=k)])
    pd.testing.assert_frame_equal(trace, expected, check_dtype=False)
    assert len(pd.read_parquet(tmp_path / "trace")) == len(trace)


def test_a_run_that_resumes_repeats_no_step(tmp_path):
    for process in (0, 1, 2):
        trace = Trace(arguments(tmp_path, process, 3))
        for step in range(1, 8):
            add(trace, step)
            if step == 4:
                trace.on_checkpoint()
    folder = tmp_path / "trace"
    (folder / "_00000007-00000009_process1.parquet_0123_unfinished").write_text("{")
    remove_after(folder, 4)
    assert not list(folder.glob("_*"))
    assert sorted(set(read_trace(folder)["step"])) == [1, 2, 3, 4]
    remove_after(tmp_path / "nowhere", 0)
    with pytest.raises(FileNotFoundError, match="contains no trace: set `trace_steps`"):
        read_trace(tmp_path / "nowhere")


def test_rows_of_the_same_steps_get_a_file_of_their_own(tmp_path):
    for split in ("eval", "eval_hard"):
        write_rows(tmp_path, arguments(tmp_path), trace_rows(grow(), ROLES, step=2, split=split))
    assert len(trace_files(tmp_path)) == 2 and set(read_trace(tmp_path)["split"]) == {"eval", "eval_hard"}


def test_texts_that_are_no_unicode(tmp_path):
    write_rows(tmp_path, arguments(tmp_path), rows_of(grow(text="\ud800\x00\n")))
    assert len(read_trace(tmp_path)) == 12


# The terminal


def test_the_best_and_the_worst_tree():
    turns = grow()
    for value, node in enumerate(turns[0]):
        node.returns = [float(value), value + 0.5]
    trees = trees_of(rows_of(turns))
    assert [tree[0]["tree"] for tree in choose_trees(trees, 0)] == [1, 0]


def test_completions_are_printed_as_trl_does_and_take_no_random_numbers(capsys):
    rows, state = rows_of(grow()), random.getstate()
    print_completions(rows, 2)
    out = capsys.readouterr().out
    assert random.getstate() == state and "Step 3" in out
    assert all(name in out for name in ("Prompt", "Completion", "Reward", "Return", "Advantage", "Agent", "Turn"))
    print_completions(trace_rows(grow(), ROLES, step=0, split="eval"), None)
    assert "Advantage" not in capsys.readouterr().out
    print_completions(rows, 0)
    assert capsys.readouterr().out == ""


def test_episodes_in_which_roles_do_not_act():
    """Each is a branch of its item's tree: here the first one earns little, and ends after two of three turns."""
    environment = Workflow()

    def sample(nodes, number):
        texts = {role: ["ba"[node.episode] * 2 for node in acting(role, nodes)] for role in ROLES}
        return {role: [Samples([1], [[1]], [text]) for text in texts[role]] for role in ROLES}

    settings = {"num_turns": 3, "num_generations": 1, "num_episodes": 2}
    turns = grow_trees(
        [{"x": "1"}, {"x": "2"}], environment, sample, lambda x: judge_nodes(environment, x), **settings
    )
    rows = trace_rows(turns, ROLES, step=1)
    assert [(row["tree"], row["episode"], row["node"]) for row in rows] == [
        *[(tree, episode, node) for node in ("/", "/0") for tree in (0, 1) for episode in (0, 1)],
        *[(tree, 1, "/0/0") for tree in (0, 1)],
    ]
    second = rows[5]
    assert (second["prompt/aux"], second["completion/aux"]) == (None, None)
    assert (second["prompt/main"], second["completion/main"]) == ("Task 1, 0.25, part main:", "aa")
    assert [second[f"{x}/{role}"] for x in ("reward", "return") for role in ROLES] == pytest.approx(
        [0.2, 0.3, 0.4, 0.6]
    )


def test_texts_of_others_cannot_control_the_terminal(capsys):
    print_completions(rows_of(grow(text="\x1b[2J\x07[b]x\r")), None)
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\x07" not in text and "\r" not in text and "[b]" in text
    with pytest.raises(SystemExit):
        fail("prog", ValueError("no item \x1b[2J"))
    assert capsys.readouterr().err == "prog: error: no item ·[2J\n"
    with pytest.raises(TaskError, match=r"^f raised ValueError: ·]0;x·$"), task_code("f"):
        raise ValueError("\x1b]0;x\x07")

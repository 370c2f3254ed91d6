"""The page of a run: its numbers, its trees and its texts; comparisons of runs; the page of an evaluation."""

import html
import json
import logging
import math
import re
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from transformers.utils import flatten_dict

from trl_multiagent import MAGRPOConfig, cli, workflow
from trl_multiagent.console import markdown_table, text_table
from trl_multiagent.jobs.signals import COMMAND_VARIABLE
from trl_multiagent.report import run_report
from trl_multiagent.report.html import json_values, render
from trl_multiagent.report.run_page import (
    MAX_TEXT,
    choose_trees,
    masked,
    read_run,
    same_item,
    tree_page,
    trees_of,
)
from trl_multiagent.report.terminal import before_and_after
from trl_multiagent.report.trace_files import read_trace, write_rows

from pages import read_page, write_run
from tiny import SAVED, Workflow, tiny_environment, tiny_items, tiny_team, tiny_trainer


pytestmark = pytest.mark.usefixtures("reports")

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> {{data}} \u2028"


def environment_with(text):
    environment = tiny_environment()
    environment.prompts = lambda item, history: dict.fromkeys(environment.roles, f"{text}{item['x']}")
    return environment


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trainer after two steps of two turns with a trace, in an environment whose prompts are hostile."""
    folder = tmp_path_factory.mktemp("run") / "mine"
    settings = {"max_steps": 2, "num_turns": 2, "num_generations": 2, "trace_steps": 1, "seed": 7}
    trainer = tiny_trainer(folder, environment=environment_with(HOSTILE), **settings)
    trainer.train()
    return trainer, folder, read_page(folder / "report.html")


def test_a_short_training_in_python_shows_what_was_learnt_and_is_not_replaced(tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)  # a test may have set it

    @workflow(roles=("aux", "main"))
    async def game(item, agents):
        rounds = 1 + len(item["x"]) % 2
        for number in range(rounds):
            answer = await agents[number](f"Round {number} of {item['x']}:")
        agents.log("rounds", rounds)
        return float(len(answer))

    def trainer():
        settings = {"max_steps": 3, "num_turns": 2, "num_generations": 2, "items_per_device": 4, "save_steps": 3}
        settings |= {"save_strategy": "steps", "disable_tqdm": False, "logging_steps": MAGRPOConfig.logging_steps}
        settings |= {"eval_on_start": True, "eval_strategy": "epoch", "eval_dataset": tiny_items(3)}
        return tiny_trainer(tmp_path / "run", tiny_team(), game, **settings)

    first = trainer()
    first.train()
    first.save_model()
    logs = [log for log in first.state.log_history if "reward" in log]
    assert [log["step"] for log in logs] == [1, 2, 3]
    assert all(1 <= log["episode/rounds"] == log["episode/length"] <= 2 for log in logs)
    lines = capsys.readouterr().out.splitlines()
    assert any(f", rounds {logs[-1]['episode/rounds']:.2f}" in line for line in lines)
    assert [line.partition(",")[0] for line in lines if line.startswith("Step ")] == ["Step 0", "Step 3"]
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["aux", "main"] * 2
    assert lines[-2:] == [f"Report           {tmp_path}/run/report.html", f"Saved team       {tmp_path}/run"]
    assert "episode/rounds" in read_page(tmp_path / "run" / "report.html")["metrics"]
    with pytest.raises(ValueError, match=r"the team and the report of an earlier run, .* choose another `output_dir`"):
        trainer().train()
    again = trainer()
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3 and not any("earlier run" in line for line in caplog.messages)
    (tmp_path / "run" / "team.json").unlink()  # as if the team was not saved
    trainer().train()
    told = "run/checkpoint-3 is of an earlier run, and this one will replace it: choose another `output_dir`"
    assert sum(told in line for line in caplog.messages) == 1


def test_the_page_has_the_numbers_of_the_run(run):
    trainer, folder, page = run
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert [json.loads(line) for line in (folder / "log.jsonl").open()] == trainer.state.log_history
    for turn in (1, 2):
        (curve,) = page["metrics"][f"turn_{turn}/reward_mean"]
        assert curve["step"] == [1, 2]
        assert curve["mean"] == pytest.approx([log[f"turn_{turn}/reward_mean"] for log in logs], rel=1e-5)
    row = next(row for row in page["table"] if row[0] == "return")
    assert row[1] == f"{logs[0]['return']:.3f}" and row[3] == f"{logs[1]['return']:.3f}"
    facts = page["facts"]
    assert (facts["name"], facts["step"], facts["max_steps"], facts["finished"]) == ("mine", 2, 2, True)
    assert facts["agents"].keys() == {"aux", "main"} and facts["dataset"].startswith("12 items")
    assert facts["settings"]["seed"] == 7 and facts["settings"]["num_turns"] == 2 and "beta" not in facts["settings"]
    assert not page["metrics"].keys() & {"step", "epoch", "train_runtime"}
    shown = json_values({"tokens": 1234567.5, "x": 1 / 3, "y": [math.nan]})
    assert shown == {"tokens": 1234567.5, "x": 0.333333, "y": [None]}
    assert (facts["env_step"], facts["num_tokens"]) == (logs[-1]["env_step"], logs[-1]["num_tokens"])


def test_the_page_has_the_trees_of_the_trace(run):
    _, folder, page = run
    trace, trees = read_trace(folder / "trace"), page["trees"]
    assert trees["left_out"] == 0 and len(trees["texts"]) == len(set(trees["texts"]))
    shown = [dict(zip(trees["columns"], row, strict=True)) for tree in trees["trees"] for row in tree]
    assert [len(tree) for tree in trees["trees"]] == [6, 6, 6, 6] and len(shown) == len(trace)
    names = ["step", "tree", "node", "action"]
    expected = trace.set_index(names)
    for row in shown:
        own = expected.loc[tuple(row[name] for name in names)]
        for name in ("reward", "return", "advantage/aux", "advantage/main", "metrics/rewards/count_reward"):
            assert row[name] == pytest.approx(own[name], rel=1e-5)
        for name in ("completion/aux", "completion/main", "prompt/aux"):
            assert trees["texts"][row[name]] == own[name]


def test_hostile_text_stays_text(run):
    _, folder, page = run
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.count("<script") == 5 == text.count("</script>") and "onerror=" in text and "<img" not in text
    assert any(x.startswith("</script><script>alert(1)") for x in page["trees"]["texts"])
    titled = render({"title": HOSTILE})
    assert html.escape("<script>alert(1)") in titled and titled.count("<script") == 5
    # Only the scripts of the page may run
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    assert policy.count("sha256-") == 4 and "default-src 'none'" in policy and "script-src 'sha256-" in policy


def test_a_run_without_a_trace_keeps_a_few_trees(tmp_path):
    settings = {"num_turns": 3, "items_per_device": 4, "num_generations": 2, "max_completion_length": 3}
    tiny_trainer(tmp_path, environment=Workflow(), max_steps=22, **settings).train()
    page = read_page(tmp_path / "report.html")["trees"]
    trees = [[dict(zip(page["columns"], row, strict=True)) for row in tree] for tree in page["trees"]]
    steps = [tree[0]["step"] for tree in trees]
    assert {*range(1, 22, 2)} <= {*steps} and all(steps.count(step) == 3 for step in range(1, 22, 2))
    # One item is followed
    example = read_page(tmp_path / "report.html")["example"]
    first, last = ([dict(zip(example["columns"], row, strict=True)) for row in tree] for tree in example["trees"])
    assert first[0]["item"] == last[0]["item"] and first[0]["step"] <= 3 and last[0]["step"] > 15
    for row in trees[-1]:
        acting = [role for role in ("aux", "main") if row[f"prompt/{role}"] is not None]
        assert acting and [x for x in ("aux", "main") if row[f"completion/{x}"] is not None] == acting
        assert row["reward"] == pytest.approx((row["reward/aux"] + row["reward/main"]) / 2, abs=1e-5)


def test_a_run_that_resumes_has_every_step_once(tmp_path):
    tiny_trainer(tmp_path, max_steps=2, **SAVED).train()
    again = tiny_trainer(tmp_path, max_steps=2, **SAVED)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").open()]
    assert steps == [1, 2, 2]  # the last entry is that of the end
    trees = read_page(tmp_path / "report.html")["trees"]
    assert [tree[0][trees["columns"].index("step")] for tree in trees["trees"]] == [1, 1, 2, 2]


def test_a_report_that_fails_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(run_report, "write_page", fail)
    monkeypatch.setattr(logging.getLogger("trl_multiagent.report.run_report"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1 and not (tmp_path / "report.html").exists()


def test_runs_are_compared(tmp_path, capsys, refused, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for seed, rewards in enumerate([(1.0, 2.0), (3.0, 4.0)]):
        write_run(tmp_path / "runs" / f"seed_{seed}", seed, rewards, num_agents=2)
    write_run(tmp_path / "single", 0, (0.5, 1.0), roles=["main"], num_agents=1)
    (tmp_path / "runs" / "seed_0" / "alarms.jsonl").write_text('{"step": 1, "alarm": "x", "message": "Idle."}\n')
    cli.main(["report", "runs", "single"])
    assert "comparison.html" in capsys.readouterr().out
    page = read_page(tmp_path / "comparison.html")
    assert page["groups"] == ["aux + main", "main"] and [run["group"] for run in page["runs"]] == [
        "aux + main"
    ] * 2 + ["main"]
    team, single = page["metrics"]["reward"]
    assert team["mean"] == [2.0, 3.0] and single == {"step": [1, 2], "mean": [0.5, 1.0]}
    assert team["low"] == [1.0, 2.0]
    assert page["table"][1] == ["reward", "3.000 [-9.706, 15.706] (n = 2)", "1.000 (n = 1)", "+2.000"]
    assert page["differences"]["single"] == {"roles": "main", "num_agents": "1"}
    assert page["alarms"] == [{"step": 1, "alarm": "x", "message": "Idle.", "run": "runs/seed_0"}]
    cli.main(["report", "runs/seed_1"])
    table = read_page(tmp_path / "runs" / "seed_1" / "report.html")["table"]
    assert table[1][1:] == ["3.000", "4.000 (step 2)", "4.000"]
    log = (tmp_path / "single" / "log.jsonl").read_text()
    damaged = '{"step":{"step": 1}\n[1]\nnull\n'  # the disk was full for a while
    (tmp_path / "single" / "log.jsonl").write_text(damaged + log)
    cli.main(["report", "single"])
    assert "log.jsonl: 3 of 5 lines are damaged, and left out." in caplog.text
    assert read_page(tmp_path / "single" / "report.html")["facts"]["step"] == 2
    (tmp_path / "runs" / "seed_0" / "run.json").write_text("")
    for folder, message in (
        ("nothing", "holds none of run.json"),
        ("runs", "runs/seed_0/run.json is damaged: Expecting value"),
    ):
        assert message in refused(cli.main, ["report", folder])


def test_runs_that_differ_in_more_than_the_seed_are_not_a_group(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, rank in (("low", 4), ("high", 16)):
        for seed in range(2):
            run = tmp_path / folder / f"seed_{seed}"
            write_run(run, seed, (1.0, 2.0))
            (run / "alarms.jsonl").write_text('{"step": 1, "alarm": "x", "message": "Idle."}\n')
            text = (
                f"seed: {seed}\npeft: {{r: {rank}}}\nagent_model: {{api_key: k{rank}}}\noutput: {{base_dir: {run}}}\n"
            )
            (run / "config.yaml").write_text(f"{text}magrpo: {{output_dir: {run}, beta: 0.1}}\n")
    cli.main(["report", "low", "high", str(tmp_path / "low")])
    page = read_page(tmp_path / "comparison.html")
    assert page["groups"] == ["peft.r 4", "peft.r 16"]
    names = ["low/seed_0", "low/seed_1", "high/seed_0", "high/seed_1"]
    assert [run["name"] for run in page["runs"]] == names == [alarm["run"] for alarm in page["alarms"]]
    assert page["differences"] == {name: {"peft.r": "4" if "low" in name else "16"} for name in names}
    facts = json.loads((tmp_path / "low" / "seed_1" / "run.json").read_text())
    (tmp_path / "low" / "seed_1" / "run.json").write_text(json.dumps({**facts, "machine": "2 processes on CPU"}))
    cli.main(["report", "low"])
    assert read_page(tmp_path / "low" / "report.html")["groups"] == ["processes 1", "processes 2"]


@pytest.mark.parametrize("command", [False, True])
def test_seeds_with_preferences_or_reward_models_of_their_own_are_a_group(tmp_path, command):
    for name, facts in (
        ("data", {"dataset": "{} items with aux_chosen, aux_prompt, chosen_by, digest {}"}),
        ("reward", {"environment": "ModelRewardEnvironment(Task(version='1',\n), version='{}{}')"}),
    ):
        for seed in range(2):
            run = tmp_path / name / f"seed_{seed}"
            write_run(run, seed, (1.0, 2.0))
            own = json.loads((run / "run.json").read_text())
            own |= {key: text.format(8 + seed, f"a{seed}") for key, text in facts.items()}
            (run / "run.json").write_text(json.dumps(own))
            if command:  # otherwise, only the data may distinguish runs
                (run / "config.yaml").write_text(f"seed: {seed}\n")
        cli.main(["report", str(tmp_path / name)])
        assert len(read_page(tmp_path / name / "report.html")["groups"]) == 2 - command


def test_traces_keep_texts_and_numbers(tmp_path):
    rows = [{"item": "007", "step": 1, "completion/a": "12", "extra/note": "2026-01-01", "extra/only": "5"}]
    rows.append({"item": "8", "step": 1, "completion/a": "true", "extra/note": None, "extra/mixed": 3})
    rows.append({"item": "9", "step": 2, "completion/a": "", "extra/note": "4", "extra/mixed": "x"})
    write_rows(tmp_path, SimpleNamespace(process_index=0, trace_max_files=1), rows)
    found = read_trace(tmp_path).to_dict("records")
    found = [{name: x for name, x in row.items() if not pd.isna(x)} for row in found]
    rows[1] = {**rows[1], "extra/mixed": "3"}
    del rows[1]["extra/note"]
    assert found == rows


def test_secrets_are_not_shown(tmp_path):
    shown = {"eos_token": "</s>", "pad_token_id": 0, "max_tokens": 5, "hub_token": None, "per_token": 0.5}
    values = {"report": [{"Token": "hf_abc", "api_key": "k"}], "password": 123}
    assert masked({**values, **shown}) == {"report": [{"Token": "***", "api_key": "***"}], "password": "***", **shown}
    assert masked({"password": 1.5, "developer_token": ["a"]}) == {"password": "***", "developer_token": "***"}
    command = masked("HF_TOKEN=hf_1 train --hub_token hf_2 '--password' hf_3 --override a.api_key=hf_4 max_tokens=5")
    assert command == "HF_TOKEN=*** train --hub_token *** '--password' *** --override a.api_key=*** max_tokens=5"
    command = masked("judge --api-key sk-1 --password 'two words' -H 'X-Api-Key: sk-2 '")
    assert command == "judge --api-key *** --password *** -H 'X-Api-Key: *** '"
    command = masked(f"https://me:p@w@host/v1 -H 'Authorization: Bearer abc' passwd=x api_key : y hf_{'a' * 34}")
    assert command == "https://***@host/v1 -H 'Authorization: Bearer *** passwd=*** api_key : *** ***"
    names = "git+ssh://git@host/x HF_DATASETS_OFFLINE=1 sk-learn-models-big-v2"
    assert masked(f"-H 'Authorization: Basic  abc==' {names}") == f"-H 'Authorization: Basic  *** {names}"
    prompt = "The secret word is {word}. Write one token about it. Secret: {word}."
    command = f"train magrpo --config secret --task secret-word --override '{prompt}'"
    assert masked(command) == command
    settings = {"hub_token": "hf_abc", "generation_token_budget": 5, "prompt": prompt, "base_url": "x?api_key=hf_abc"}
    settings["extra_body"] = '{"password": "hf_abc"}'
    write_run(tmp_path / "run", 0, [1.0])
    assert read_run(tmp_path / "run").configuration == ""
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(settings) + "# token: hf_abc\n")
    configuration = read_run(tmp_path / "run").configuration
    assert "hf_abc" not in configuration
    hidden = {"hub_token": "***", "base_url": "x?api_key=***", "extra_body": '{"password": ***}'}
    assert yaml.safe_load(configuration) == settings | hidden


def test_trees_without_a_return_are_not_shown_as_what_was_learnt():
    def tree(step, item, *returns):
        return [
            {"step": step, "split": "train", "item": item, "turn": 1, "node": "/", "action": k, "return": x}
            | {"completion/a": f"answer {k}"}
            for k, x in enumerate(returns)
        ]

    first, middle = tree(1, "x", math.nan, 2.0, 4.0, math.nan), tree(5, "x", 1.0, math.nan)
    silent = [tree(step, "y", math.nan) for step in (1, 9)]
    trees = [silent[0], first, middle, tree(9, "x", math.nan, math.nan), silent[1]]
    assert same_item(trees) == [first, middle] and same_item(silent) == []
    assert before_and_after([first, middle]) == [
        *("", "Step 1, return 4.00:", "  a          answer 2"),
        *("", "Step 5, return 1.00:", "  a          answer 0", ""),
    ]
    second = first[2] | {"turn": 2, "node": "/2", "action": 0, "completion/a": "revised"}
    branch = [row | {"episode": math.nan} for row in (first[2], second)]  # as beside episodes in a file
    assert before_and_after([branch])[2:4] == ["  a          answer 2", "  a          revised"]
    best, last, _ = choose_trees(trees, 0)
    assert best == first and last in (*silent, trees[3])


def test_settings_by_their_paths():
    # An empty section is a setting: a run with it has adapters, and must not go on without them
    assert flatten_dict({"peft": {}, "seed": 1, "a": {"b": {"c": [2]}}}) == {"peft": {}, "seed": 1, "a.b.c": [2]}


def test_pages_are_bounded():
    row = {"step": 1, "split": "train", "process": 0, "item": "1", "node": "/", "parent": "", "turn": 1, "action": 0}
    row |= {"reward": 1.0, "return": 1.0, "prompt/a": "p", "advantage/a": math.nan, "extra/tests": ""}
    long = tree_page([[{**row, "extra/note": "x" * 30_000, "node": f"/{k}"} for k in range(100)] for _ in range(9)])
    assert len(long["trees"]) == 2 and long["trees"][0][0][long["columns"].index("extra/note")].endswith("characters")
    rows = [{**row, "tree": k, "completion/a": f"{k}" + "x" * 30_000} for k in range(300)]
    page = tree_page(trees_of(rows))
    assert len(page["trees"]) == 100 and page["left_out"] == 200
    assert max(map(len, page["texts"])) < MAX_TEXT + 50 and page["texts"][1].endswith("10003 more characters")
    last = dict(zip(page["columns"], page["trees"][-1][0], strict=True))
    assert last["tree"] == 299 and last["advantage/a"] is None and page["texts"][last["prompt/a"]] == "p"


def test_tables():
    rows = [["a", "number", "x"], ["long name", "1", "2.50"]]
    assert text_table(rows) == ["a          number     x", "-----------------------", "long name       1  2.50"]
    assert markdown_table([["a", "b"], ["x|y", 0.5]]) == "| a | b |\n| --- | --- |\n| x\\|y | 0.5 |\n"

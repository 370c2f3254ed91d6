"""The commands `evaluate` and `cross-play` with tiny teams."""

import argparse
import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from evaluated import ITEMS, TASK, LetterEnvironment, evaluate

from trl_multiagent import Task
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.evaluation.players import PipelineSampler
from trl_multiagent.evaluation.statistics import item_values
from trl_multiagent.rollout.tree import Node, Samples
from trl_multiagent.runs.evaluation_settings import USED, algorithm_of, find_config, find_team, safe_settings
from trl_multiagent.settings.read import CONFIGS, RECIPES, ConfigError, read_yaml, renamed

from pages import read_page
from tiny import Workflow, count_reward, team_of, tiny_items, tiny_team


HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two saved teams, of different sizes, one with LoRA adapters."""
    folder = tmp_path_factory.mktemp("runs")
    team_of("heterogeneous").save_pretrained(folder / "small")
    tiny_team().save_pretrained(folder / "plain")
    (folder / "plain" / "config.yaml").write_text(
        f"agent_model:\n  name: {folder / 'plain' / 'agents' / 'aux'}\ndataset:\n  eval_split: test\nmagrpo:\n  "
        "num_agents: 2\n"
    )
    return folder


@pytest.fixture(scope="module")
def evaluated(runs, tmp_path_factory):
    """An evaluation with all baselines, with which others are compared: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("evaluated") / "results"
    names = "raw_single_agent,concatenation,pipeline"
    evaluate(runs / "plain", "--num_turns", "2", "--output_dir", folder, "--baselines", names)
    return folder


def transcripts(folder, name="plain"):
    lines = (folder / "transcripts" / name / "transcripts.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "timing"} for line in lines]


def report(folder, name="evaluation"):
    return json.loads((folder / f"{name}.json").read_text())


def test_numbers_are_those_of_the_transcripts(evaluated):
    records = transcripts(evaluated)
    assert [(r["item"], r["episode"]) for r in records] == [(i, e) for i in range(ITEMS) for e in range(4)]
    contents = report(evaluated)
    team = contents["policies"]["plain"]
    for t, turn in enumerate(("turn_1", "turn_2")):
        turns = [record["turns"][t] for record in records]
        assert [turn["reward"] for turn in turns] == count_reward([turn["completions"] for turn in turns])
        mean = sum(turn["reward"] for turn in turns) / len(turns)
        assert team["results"][turn]["reward"]["mean"] == pytest.approx(mean)
        assert team["results"][turn]["rewards/count_reward"]["mean"] == pytest.approx(mean)
        passed = sum(turn["metrics"]["passed"] for turn in turns) / len(turns)
        assert 0 < passed < 1 and team["results"][turn]["pass@1"]["mean"] == pytest.approx(passed)
    tokens = sum(sum(turn["tokens"].values()) for record in records for turn in record["turns"])
    assert team["cost"]["generated_tokens"] == tokens and team["cost"]["calls"] == len(records) * 4
    table = (evaluated / "evaluation.txt").read_text()
    assert "return" in table and "pass@1" in table and "the team minus" in table
    assert set(contents["policies"]) == {"plain", "raw_single_agent", "concatenation", "pipeline"}
    assert set(contents["differences"]) == set(contents["policies"]) - {"plain"}
    page = read_page(evaluated / "report.html")["evaluation"]
    assert page["policies"]["plain"]["results"]["final"]["pass@1"] == pytest.approx(
        team["results"]["final"]["pass@1"], rel=1e-5
    )
    assert page.keys() == contents.keys() and page["differences"].keys() == contents["differences"].keys()


def test_an_evaluation_goes_on_where_it_was_killed(evaluated, runs, tmp_path):
    """Some batches are there, and one was written in part."""
    folder = tmp_path / "results"
    shutil.copytree(evaluated, folder)
    own = folder / "transcripts" / "plain"
    lines = (own / "transcripts.jsonl").read_text().splitlines(keepends=True)
    (own / "transcripts.jsonl").unlink()
    (own / "items_000000_to_000003.jsonl").write_text("".join(lines[:12]))
    (own / "_items_000003_to_000006.jsonl_unfinished").write_text("".join(lines[12:17]) + lines[17][:50])
    (own / "items_000006_to_000007.jsonl").write_text("".join(lines[24:28]))
    evaluate(runs / "plain", "--num_turns", "2", "--output_dir", folder)
    assert transcripts(folder) == transcripts(evaluated)
    kept = (own / "transcripts.jsonl").read_text().splitlines(keepends=True)
    assert kept[:12] == lines[:12] and kept[24:] == lines[24:]  # their seconds, too: they were not played again
    assert sorted(path.name for path in own.iterdir()) == ["stage.json", "transcripts.jsonl"]
    assert list(report(folder)["policies"]) == ["plain"]


def test_numbers_depend_neither_on_processes_nor_on_batches(evaluated, runs, tmp_path, forked):
    arguments = [runs / "plain", "--num_turns", "2", "--output_dir"]
    done = forked.run(HELPERS / "evaluated.py", *arguments, tmp_path / "two", processes=2)
    assert done.codes == [0, 0], done.stderr[-4000:]
    assert transcripts(tmp_path / "two") == transcripts(evaluated)
    arguments = [runs / "plain", "--num_turns", "2", "--items_per_batch", "5", "--generation_token_budget", "100"]
    evaluate(*arguments, "--output_dir", tmp_path / "batches")
    assert transcripts(tmp_path / "batches") == transcripts(evaluated)


def test_a_folder_of_another_evaluation_is_refused(evaluated, runs, refused):
    message = refused(
        evaluate, runs / "plain", "--num_turns", "2", "--output_dir", evaluated, "--temperature", "0.5", "--seed", "1"
    )
    assert "holds another evaluation: temperature was 1.0, is 0.5; seed was 42, is 1. Choose another folder" in message


def test_what_the_baselines_see_and_cost(evaluated):
    team, single = transcripts(evaluated), transcripts(evaluated, "raw_single_agent")
    assert set(single[0]["turns"][0]["prompts"]) == {"main"}
    for name, limit in (("concatenation", 6), ("pipeline", 6), ("raw_single_agent", 12)):
        records = transcripts(evaluated, name)
        lengths = [x for record in records for turn in record["turns"] for x in turn["tokens"].values()]
        assert max(lengths) == limit
        first = [record["turns"][0]["prompts"] for record in records]
        for own, theirs in zip(first, team, strict=True):  # the same items, and the same prompts to begin with
            assert own[next(iter(own))] == theirs["turns"][0]["prompts"][next(iter(own))]
    for record in transcripts(evaluated, "pipeline"):
        for turn in record["turns"]:
            answer = turn["completions"]["aux"].strip()
            assert turn["prompts"]["main"].startswith(f"The answer of aux:\n\n{answer}\n\n")
            assert "The answer of" not in turn["prompts"]["aux"]


def test_answers_end_with_the_stop_strings_of_the_training(runs, evaluated, tmp_path, refused):
    letters = "aeiounrst "
    given = {"main": [*letters]}
    override = ("--override", f"magrpo.stop_strings={given}")
    evaluate(runs / "plain", "--num_turns", "1", "--output_dir", tmp_path, *override)
    stopped = 0
    for one, whole in zip(transcripts(tmp_path), transcripts(evaluated), strict=True):
        one, whole = one["turns"][0], whole["turns"][0]
        text = whole["completions"]["main"]
        end = next((k + 1 for k, letter in enumerate(text) if letter in letters), None)
        assert one["completions"] == {**whole["completions"], "main": text[:end]}
        assert one["finished"] == {**whole["finished"], "main": end is not None or whole["finished"]["main"]}
        stopped += end is not None
    assert 3 < stopped < ITEMS * 4
    assert "`stop_strings` is {'x': ['e']}; it must have lists of texts for aux, main." in refused(
        evaluate, runs / "plain", "--output_dir", tmp_path / "x", "--stop_strings", "{x: [e]}"
    )


def test_cross_play_of_teams_of_different_sizes(runs, evaluated, tmp_path, capsys):
    items = ("--override", "dataset.eval_size=3")
    evaluate(runs / "plain", runs / "small", "--num_turns", "2", *items, "--output_dir", tmp_path, cross_play=True)
    contents = report(tmp_path, "cross_play")
    cross_play = contents["cross_play"]
    assert cross_play["runs"] == ["plain", "small"]
    ((first, mixed), (other, last)) = cross_play["return"]["matrices"]["aux"]
    means = {name: x["results"]["final"]["return"]["mean"] for name, x in contents["policies"].items()}
    assert [first, mixed, other, last] == pytest.approx([means[n] for n in ("plain", "mix_0_1", "mix_1_0", "small")])
    own = transcripts(tmp_path)
    assert own == transcripts(evaluated)[: len(own)]  # agents trained together play as in `evaluate`
    both = own, transcripts(tmp_path, "mix_0_1")
    answers, mixed = ([record["turns"][0]["completions"] for record in records] for records in both)
    assert [x["aux"] for x in mixed] == [x["aux"] for x in answers]  # the aux of `plain`, with another main
    assert [x["main"] for x in mixed] != [x["main"] for x in answers]
    out = capsys.readouterr().out
    assert "agents trained together" in out and "There is no interval over runs" in out
    shown = read_page(tmp_path / "report.html")["evaluation"]["cross_play"]
    assert shown["return"]["matrices"]["aux"][0] == pytest.approx(cross_play["return"]["matrices"]["aux"][0], rel=1e-5)


def test_several_teams_and_a_dry_run(runs, tmp_path, capsys):
    hostile = tmp_path / "\x1b[2J"
    evaluate(runs / "plain", runs / "small", "--output_dir", hostile, "--dry_run", "--baselines", "raw_single_agent")
    out = capsys.readouterr().out
    assert f"{ITEMS}, with 4 episodes of 1 turns each" in out and "56 completions, 336 tokens at most" in out
    assert "28 completions, 336 tokens at most" in out and "\x1b" not in out and not list(tmp_path.iterdir())
    evaluate(runs / "plain", runs / "small", "--output_dir", tmp_path)
    contents = report(tmp_path)
    both, rows = contents["over_teams"]["final"]["return"], contents["policies"].values()
    assert both["mean"] == pytest.approx(sum(x["results"]["final"]["return"]["mean"] for x in rows) / 2)
    assert "all teams" in (tmp_path / "evaluation.txt").read_text()


def test_wrong_input_is_one_line_and_loads_nothing(runs, tmp_path, capsys, refused, monkeypatch):
    monkeypatch.setattr("trl_multiagent.AgentTeam.from_pretrained", None)
    tiny_team(("left", "right")).save_pretrained(tmp_path / "others")
    capsys.readouterr()
    plain = runs / "plain"
    out = ["--output_dir", tmp_path / "results"]
    no_single = Task(lambda settings: LetterEnvironment(("aux", "main")), TASK.load_datasets, settings=TASK.settings)
    for arguments, message in [
        ([tmp_path / "nowhere"], "no such folder"),
        ([plain, "--k", "1", "9"], "pass@9 needs at least 9 episodes per item, but `num_episodes` is 4"),
        ([plain, "--split", "empty"], "no items to evaluate on"),
        ([runs / "small"], "set `dataset.eval_split` or --split"),
        ([tmp_path / "others", "--split", "test"], "has the roles left, right, but the task has aux, main"),
        ([runs / "small", "--split", "test", "--baselines", "pipeline"], "give `--baseline_model`"),
        ([plain, "--num_episode", "3"], "did you mean `--num_episodes`"),
        ([plain, "--output_dir", plain / "team.json"], "is a file"),
        ([plain, "--override", "magrpo.num_agents=1"], "has the roles aux, main, but the task has main"),
    ]:
        assert message in refused(evaluate, *arguments, *([] if "--output_dir" in arguments else out))
    sets = dataclasses.replace(
        TASK,
        load_datasets=lambda s: (
            tiny_items(len(s.dataset.eval_split)),
            {"easy": tiny_items(2), "hard": tiny_items(2)},
        ),
    )
    assert "the evaluation sets easy, hard" in refused(evaluate, plain, *out, task=sets)
    assert "it always has the roles aux, main" in refused(
        evaluate, plain, "--baselines", "raw_single_agent", *out, task=no_single
    )
    control = (runs / "small", "--override", "evaluation.control=single_agent")
    for arguments, message in (((), "at least two runs"), (control, "`evaluation.control` has no place in")):
        assert message in refused(evaluate, plain, *arguments, *out, cross_play=True)


STRANGE = {
    "task: strange:TASK": "task: 'strange:TASK'",
    "task: functions\nreward_funcs: [subprocess.getoutput]": "functions.reward_funcs: ['subprocess.getoutput']",
    "agent_model: {trust_remote_code: true}": "agent_model.trust_remote_code: True",
    "model: {model_kwargs: {trust_remote_code: true}}": "agent_model.trust_remote_code: True",
    "magrpo: {trust_remote_code: true}": "agent_model.trust_remote_code: True",
    (
        "agent_model: {trust_remote_code: '${agent_model.share_weights}', share_weights: true}"
    ): "agent_model.trust_remote_code: '${",
    "agent_model: {model_kwargs: {weights_only: false}}": "agent_model.model_init_kwargs: {'weights_only': False}",
    "agent_model: {attn_implementation: user/kernel}": "agent_model.attn_implementation: 'user/kernel'",
    "seats: {aux: {endpoint: {model: m, base_url: 'http://h', key_env: SECRET}}}": "seats: {'aux'",
    "dataset: {name: '${oc.env:SECRET}/x'}": "dataset.name: '${oc.env:SECRET}/x'",
    "magrpo: {num_turns: '${seed}'}": "magrpo.num_turns: '${seed}'",
    "prompt_files: {main: 'strange:prompt'}": "prompt_files.main: 'strange:prompt'",
    "prompt_files: {main: 'Do {prompt} for ${oc.env:SECRET}'}": "prompt_files.main: 'Do {prompt} for ${oc.env",
    "external: {mode: expert, expert_base_url: 'http://h'}": "external.mode: 'expert'",
    "sandbox: {min_tier: rlimits}": "sandbox.min_tier: 'rlimits'",
    "evaluation: {output_dir: elsewhere}": "evaluation.output_dir: 'elsewhere'",
    "evaluation: {output_dir: '12'}": "evaluation.output_dir: '12'",
    "prompt_files: {main: '12'}": "prompt_files.main: '12'",
    "task: [strange:TASK]": "task: ['strange:TASK']",
    "poem: {letters: xyz}": "poem.letters: 'xyz'",
}
# What a run of this package writes, in its own words and in those of a prompt with a brace
OWN = """
agent_model: {name: demo, torch_dtype: float32, attn_implementation: sdpa}
dataset: {name: humaneval, train_split: 'test[:8]', eval_split: 'test[:2]'}
external: {mode: plain, expert_model: deepseek-coder, sandbox_slice: all}
reward: {kind: earned}
prompt_files: {main: "Write {entry_point}: {prompt} and \\\\${{x}}"}
sandbox: {min_tier: seccomp, workers: 2}
output: {base_dir: '${oc.env:SECRET}'}
wandb: {project: p}
magrpo: {learning_rate: 1e-5, output_dir: /run, num_agents: 2, lr_scheduler_type: constant, temperature: 0.7}
peft: {target_modules: [q_proj]}
"""


@pytest.mark.parametrize("text", STRANGE)
def test_the_file_of_a_team_does_nothing_without_consent(runs, tmp_path, monkeypatch, refused, text):
    """It runs no code, sends nothing, and names no place to write to, in an evaluation and in a cross-play."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "sk-1")
    Path("strange.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    shutil.copytree(runs / "plain", "team")
    Path("team/strange.py").write_text(Path("strange.py").read_text())
    Path("team/config.yaml").write_text(text)
    cross_play = text == "task: strange:TASK"
    line = refused(evaluate, "team", *["other"] * cross_play, "--dry_run", task=None, cross_play=cross_play)
    assert f"the team's config.yaml asks for `{STRANGE[text]}" in line and "sk-1" not in line
    assert line.endswith("pass `--config team/config.yaml` if you trust it.")
    assert not Path("ran").exists() and str(tmp_path / "team") not in sys.path


def test_the_file_of_a_run_of_a_known_task_is_used(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "plain", "team")
    Path("team/config.yaml").write_text(OWN)
    evaluate("team", "--dry_run", "--k", "2", task=None)
    out = capsys.readouterr().out
    assert "pass@k           2\n" in out
    assert (
        "2, with 4 episodes of 1 turns each" in out and "temperature      0.7" in out and "outputs/evaluation" in out
    )
    Path("task.py").write_text("from evaluated import TASK\n")
    Path("team/config.yaml").write_text("task: task:TASK\ndataset: {eval_split: test}\n")
    evaluate("team", "--config", "team/config.yaml", "--dry_run", task=None)
    assert f"{ITEMS}, with 4 episodes" in capsys.readouterr().out


def test_runs_with_the_settings_of_every_recipe_need_no_consent_but_for_games_and_prompts(tmp_path):
    asked = {"nim": "seats", "nim_smollm2": "seats", "hanabi": "textarena.game"}  # they may load models and run code
    teams = [f"magrpo_{name}_coder" for name in ("mbpp", "he", "che", "demo")]
    asked |= dict.fromkeys([*teams, "iac_demo_coder", "madpo_demo_coder", "marlhf_demo_coder"], "prompt_files.aux")
    asked |= dict.fromkeys(["grpo_mbpp_coder", "grpo_demo_coder"], "prompt_files.main")
    asked |= dict.fromkeys(["magrpo_classeval_coder", "grpo_classeval_coder"], "prompt_files.methods")
    families = ("block_building", "bug_fixing", "class_completion", "writing")
    for path in CONFIGS.glob(RECIPES):
        written, family = read_yaml(str(path)), path.parts[-3]
        algorithm = algorithm_of(written)
        saved = renamed(algorithm, [{"task": family} if family in families else {}, written])
        if not path.stem.startswith("needed"):
            (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
            arguments = argparse.Namespace(config=None, task=None)
            argv = (algorithm, None, str(tmp_path / "config.yaml"), arguments, USED)
            if path.stem in asked:
                with pytest.raises(ConfigError, match=f"asks for `{asked[path.stem]}: "):
                    safe_settings(*argv)
            else:
                assert safe_settings(*argv)


def test_an_empty_section_of_a_run_takes_the_defaults_again(tmp_path):
    """Or a control of a LoRA team would be a full model."""
    (tmp_path / "config.yaml").write_text("peft: {}\nmagrpo: {max_steps: 2}\n")
    arguments = argparse.Namespace(config=None, task=None)
    assert safe_settings("magrpo", None, str(tmp_path / "config.yaml"), arguments, None)["peft"] == {}


def test_a_task_without_passed_has_no_pass_at_k(runs, tmp_path, capsys):
    class Plain(LetterEnvironment):
        evaluate = LetterEnvironment.score

    task = Task(lambda settings: Plain(("aux", "main")), TASK.load_datasets, settings=TASK.settings)
    argv = (runs / "plain", "--override", "dataset.eval_size=1", "--output_dir")
    evaluate(*argv, tmp_path / "none", task=task)
    assert "No pass@k: the task reports no metric `passed`" in capsys.readouterr().out
    evaluate(*argv, tmp_path / "other", "--pass_metric", "rewards/count_reward", task=task)
    assert "pass@1" in report(tmp_path / "other")["policies"]["plain"]["results"]["final"]


def test_answers_without_a_reward(runs, tmp_path, capsys):
    """They are an error or, as in a training, left out of the means and counted."""

    class Silent(LetterEnvironment):
        def score(self, items, joint_actions, histories):
            outcomes = super().score(items, joint_actions, histories)
            for outcome, action in zip(outcomes, joint_actions, strict=True):
                outcome.reward = 1.0 if len(action["aux"]) % 2 else float("nan")
            return outcomes

        evaluate = score

    task = dataclasses.replace(TASK, make_environment=lambda settings: Silent(("aux", "main")))
    arguments = (runs / "plain", "--output_dir", tmp_path / "results", "--num_episodes", "4")
    with pytest.raises(TaskError, match="returned the reward nan"):
        evaluate(*arguments, task=task)
    evaluate(*arguments, "--reward_none", "drop", task=task)
    turns = [record["turns"][-1] for record in transcripts(tmp_path / "results")]
    number = sum(math.isnan(turn["reward"]) for turn in turns)
    assert 0 < number < len(turns)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("reward")]
    assert [line[:2] for line in lines if line[0] == "reward"] == [["reward", "1.000"]]
    share = [float(line[1]) for line in lines if line[0] == "reward_none"]
    assert share == [pytest.approx(number / len(turns), abs=1e-3)]
    assert "NaN" not in (tmp_path / "results" / "evaluation.json").read_text()


def test_episodes_in_which_roles_do_not_act(runs, tmp_path):
    """
    Of several lengths, with rewards per role, for teams, baselines, teams without an agent, and teams of agents of two
    runs.
    """
    rows = Dataset.from_dict({"x": ["1", "12", "1234"]})  # one of each of the kinds of `Workflow`
    load = lambda settings: (rows, rows if settings.dataset.eval_split else None)  # noqa: E731
    task = Task(lambda settings: Workflow(), load, settings=TASK.settings)
    names = ("--baselines", "pipeline", "--contributions")
    common = ("--num_turns", "3", "--output_dir")
    evaluate(runs / "plain", *common, tmp_path / "results", *names, task=task)
    records, contents = transcripts(tmp_path / "results"), report(tmp_path / "results")
    for record in records:
        plan = Workflow.plans[record["item"]]
        turns = record["turns"]
        assert [tuple(turn["completions"]) for turn in turns] == [*plan[: len(turns)]]
        assert [tuple(turn["prompts"]) for turn in turns] == [*plan[: len(turns)]]
        assert len(turns) == (3 if turns[1]["reward"] >= 0.05 else 2)
        expected = Workflow().score([], [turn["completions"] for turn in turns], [])
        assert [turn["role_rewards"] for turn in turns] == expected
        assert [turn["reward"] for turn in turns] == pytest.approx([(x["aux"] + x["main"]) / 2 for x in expected])
    assert {len(record["turns"]) for record in records} == {2, 3}
    results, cost = (contents["policies"]["plain"][name] for name in ("results", "cost"))
    for role in ("aux", "main"):
        returns = [sum(turn["role_rewards"][role] for turn in record["turns"]) for record in records]
        last = [record["turns"][-1]["role_rewards"][role] for record in records]
        found = [results["final"][f"{name}/{role}"]["mean"] for name in ("return", "reward")]
        assert found == pytest.approx([sum(returns) / len(returns), sum(last) / len(last)])
    assert cost["calls"] == sum(len(turn["completions"]) for record in records for turn in record["turns"])
    assert "reward/main" in (tmp_path / "results" / "evaluation.txt").read_text()
    for record in transcripts(tmp_path / "results", "pipeline"):
        for turn in record["turns"]:  # it sees the answers of this turn alone
            assert turn["prompts"].get("main", "").startswith("The answer of aux") == (len(turn["prompts"]) == 2)
    evaluate(runs / "plain", runs / "small", *common, tmp_path / "crossed", task=task, cross_play=True)
    assert transcripts(tmp_path / "crossed") == records


def test_roles_that_have_rewards_of_their_own_at_the_end_alone():
    turns = [{"reward": 0.0, "metrics": {}}, {"reward": 1.5, "metrics": {}, "role_rewards": {"aux": 1.0, "main": 2.0}}]
    values = item_values([turns], EvaluationConfig(discount=0.5))
    assert values["final", "return"] == 0.75 and values["final", "return/main"] == 1.0
    assert [values[turn, "reward/aux"] for turn in ("turn_1", "turn_2", "final")] == [0.0, 1.0, 1.0]


def test_a_return_without_a_discount_has_no_later_turns():
    turns = [{"reward": 2.0, "metrics": {}}, {"reward": math.nan, "metrics": {}}]
    assert item_values([turns], EvaluationConfig(discount=0.0))["final", "return"] == 2.0


def test_the_team_of_a_run_without_its_own(runs, tmp_path, monkeypatch):
    """A run that only has checkpoints, and one that saved its team in another place."""
    for step in (5, 10):
        shutil.copytree(runs / "small", tmp_path / "run" / f"checkpoint-{step}")
    (tmp_path / "run" / "config.yaml").write_text("output: {}\n")
    assert find_team(str(tmp_path / "run")) == str(tmp_path / "run" / "checkpoint-10")
    assert find_config(str(tmp_path / "run" / "checkpoint-5")) == str(tmp_path / "run" / "config.yaml")
    shutil.copytree(runs / "plain", tmp_path / "team")
    for folder in ("run", "team"):
        (tmp_path / folder / "config.yaml").write_text(f"output:\n  save_path: {tmp_path / 'team'}\n")
    assert find_team(str(tmp_path / "run")) == str(tmp_path / "team")
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("run", "team"):
        (tmp_path / folder / "config.yaml").write_text("output: {save_path: ~/team}\n")
    assert find_team(str(tmp_path / "run")) == str(tmp_path / "team")
    elsewhere = f"output:\n  save_path: {tmp_path / 'team'}\n"
    (tmp_path / "team" / "config.yaml").write_text(f"seed: 2\n{elsewhere}")
    (tmp_path / "run" / "config.yaml").write_text(f"{elsewhere}wandb:\n  dir: ${{oc.env:NOT_SET}}\n")
    assert find_team(str(tmp_path / "run")) == str(tmp_path / "run" / "checkpoint-10")
    for folder in (tmp_path / "run").glob("checkpoint-*"):
        shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="where another team is now: give that folder"):
        find_team(str(tmp_path / "run"))
    (tmp_path / "team" / "config.yaml").unlink()
    assert find_team(str(tmp_path / "run")) == str(tmp_path / "team")
    assert find_config(str(tmp_path)) is None


def test_the_items_of_a_task_without_a_split(runs, tmp_path, capsys, refused):
    """A task may have an evaluation set of its own; with `--dataset`, all rows are played."""

    def dry_run(evaluation_set, *argv):
        def load_datasets(settings):
            return settings.dataset and (rows, evaluation_set)

        task = Task(TASK.make_environment, load_datasets, settings=TASK.settings)
        evaluate(runs / "small", *argv, "--output_dir", tmp_path / "x", "--dry_run", task=task)

    rows = Dataset.from_dict({"x": ["1", "2"]})
    for evaluation_set, argv in ((rows, ()), (None, ("--dataset", "all"))):
        dry_run(evaluation_set, *argv)
        assert "2, with 4 episodes" in capsys.readouterr().out
    assert "or give --dataset" in refused(dry_run, None)


def test_the_history_is_that_of_the_training_unless_a_flag_says_otherwise(runs, evaluated, tmp_path):
    def second_prompts(folder):
        return [record["turns"][1]["prompt_tokens"]["main"] for record in transcripts(folder)][:4]

    common = (runs / "plain", "--num_turns", "2", "--override", "dataset.eval_size=1")
    evaluate(*common, "magrpo.original_prompt=false", "--output_dir", tmp_path / "as_trained")
    evaluate(*common, "--original_prompt", "false", "--output_dir", tmp_path / "flag")
    assert second_prompts(tmp_path / "flag") == second_prompts(tmp_path / "as_trained") != second_prompts(evaluated)


def test_chat_templates_get_the_arguments_of_the_training(runs, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ effort | default('') }}"
    team, lengths = tiny_team(chat_template=template), []
    for own, given in (({}, None), ({"effort": "high"}, None), ({"effort": "high"}, "{effort: higher}")):
        team.chat_template_kwargs["main"] = own
        team.save_pretrained(tmp_path / "plain")
        shutil.copy(runs / "plain" / "config.yaml", tmp_path / "plain")
        flags = [] if given is None else ["--chat_template_kwargs", given]
        folder = tmp_path / str(len(lengths))
        evaluate(tmp_path / "plain", "--override", "dataset.eval_size=1", *flags, "--output_dir", folder)
        lengths.append(transcripts(folder)[0]["turns"][0]["prompt_tokens"]["main"])
    assert lengths == [lengths[0], lengths[0] + len("high"), lengths[0] + len("higher")]


def test_an_answer_in_the_prompt_of_another_agent_ends_no_turn(monkeypatch):
    team = tiny_team(chat_template="{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    sampler = PipelineSampler(LetterEnvironment(team.roles), team, None)
    answer = Samples([], [[1]], ["raise ValueError('<eos>')"])
    monkeypatch.setattr(sampler, "sample", lambda roles, nodes, number: {role: [answer] for role in roles})
    node = Node({}, (), dict.fromkeys(team.roles, "P"))
    sampler([node], 1)
    ((message,),) = [prompt.prompt for prompt in sampler.prompts("main", [node])]
    assert message["content"] == "The answer of aux:\n\nraise ValueError('< eos>')\n\nP"

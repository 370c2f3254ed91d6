"""The trained control, and teams with an agent replaced."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from evaluated import TASK, evaluate

from trl_multiagent import AgentTeam, workflow
from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.evaluation.statistics import FINAL, Result, numbers_of
from trl_multiagent.runs.evaluation import StopWhenSpent, message_policies, mixed_policies
from trl_multiagent.runs.run import run_recipe
from trl_multiagent.settings.read import ConfigError

from tiny import tiny_team


ITEMS = 4
HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folders of two runs with different seeds."""
    folder = tmp_path_factory.mktemp("trained")
    tiny_team().save_pretrained(folder / "base")
    for seed in (0, 1):
        settings = {
            "agent_model": {"name": str(folder / "base" / "agents" / "main"), "torch_dtype": "float32"},
            "dataset": {"eval_split": "test", "eval_size": ITEMS},
            "seed": seed,
            "magrpo": {
                **{"num_agents": 2, "output_dir": str(folder / f"run_{seed}"), "items_per_device": 3, "max_steps": 2},
                **{"num_generations": 2, "max_completion_length": 6, "num_iterations": 2, "frozen_agents": ["aux"]},
                **{"learning_rate": 0.01, "gradient_checkpointing": False, "bf16": False, "save_strategy": "no"},
                **{"report_to": "none", "disable_tqdm": True},
            },
        }
        path = folder / f"{seed}.yaml"
        path.write_text(yaml.safe_dump(settings))
        run_recipe("magrpo", TASK, ["--config", str(path)], "train")
    return folder


@pytest.fixture(scope="module")
def compared(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared") / "results"
    runs = [trained / "run_0", trained / "run_1"]
    evaluate(*runs, "--control", "single_agent", "--contributions", "--output_dir", folder)
    return folder


def report(folder):
    return json.loads((folder / "evaluation.json").read_text())


def test_the_control_is_one_agent_trained_at_the_cost_of_the_team(trained, compared):
    control = compared / "controls" / "run_0"
    team = AgentTeam.from_pretrained(control)
    assert team.roles == ("main",)
    settings = yaml.safe_load((control / "config.yaml").read_text())["magrpo"]
    assert settings["max_completion_length"] == 12 and settings["num_agents"] == 1
    own, cost = (json.loads((x / "training_cost.json").read_text()) for x in (control, trained / "run_0"))
    # One batch of 3 items with 2 joint actions, used for two steps
    assert cost["env_steps"] == 6 and cost["optimizer_steps"] == 2 and 12 <= cost["generated_tokens"] <= 6 * 2 * 6
    assert own["env_steps"] >= cost["env_steps"]
    assert own["optimizer_steps"] == settings["max_steps"] == 2  # a batch of its trees has 3 items with 2 answers


def test_two_processes_train_a_control_and_compare_it(trained, forked, tmp_path):
    arguments = [trained / "run_0", "--control", "single_agent", "--output_dir", tmp_path / "two"]
    done = forked.run(HELPERS / "evaluated.py", *arguments, processes=2)
    assert done.codes == [0, 0], done.stderr[-3000:]
    assert report(tmp_path / "two")["control"]["single_agent"]


def test_an_interrupted_control_goes_on(trained, tmp_path, monkeypatch):
    run = changed(trained, tmp_path / "run", num_iterations=1, save_strategy="steps", save_steps=1)
    (run / "training_cost.json").write_text(
        json.dumps({"env_steps": 18, "generated_tokens": 18, "optimizer_steps": 3})
    )
    steps, on_step_end = [], StopWhenSpent.on_step_end

    def record(self, args, state, control, **kwargs):
        steps.append(state.global_step)
        if steps == [1, 2]:
            raise RuntimeError("interrupted")
        on_step_end(self, args, state, control, **kwargs)

    monkeypatch.setattr(StopWhenSpent, "on_step_end", record)
    argv = (run, "--control", "single_agent", "--output_dir", tmp_path / "results")
    with pytest.raises(RuntimeError, match="interrupted"):
        evaluate(*argv)
    evaluate(*argv)
    assert steps == [1, 2, 2, 3]


def changed(trained, run, **changes):
    """A copy of a run with other settings."""
    shutil.copytree(trained / "run_0", run)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["agent_model"] |= changes.pop("agent_model", {})
    settings["magrpo"] |= changes
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    return run


def test_the_control_of_a_team_with_early_termination_gets_its_whole_budget(trained, tmp_path):
    """All episodes of the team ended after the first turn of two. A tree of the control has 6 answers, a batch 18."""
    changes = {"num_turns": 2, "early_termination_threshold": 0.0, "lr_scheduler_type": "constant"}
    run = changed(trained, tmp_path / "run", **changes)
    cost = {"env_steps": 30, "generated_tokens": 30, "optimizer_steps": 2}
    (run / "training_cost.json").write_text(json.dumps(cost))
    argv = ("--control", "single_agent", "--num_turns", "1", "--override", "dataset.eval_size=1")
    evaluate(run, *argv, "--output_dir", tmp_path / "results")
    own = json.loads((tmp_path / "results" / "controls" / "run" / "training_cost.json").read_text())
    assert own["env_steps"] == 2 * 18 and own["optimizer_steps"] == 2 * 2  # each batch of trees is used twice
    assert own["generated_tokens"] >= 30


def test_the_report_has_team_control_and_their_difference(compared):
    contents = report(compared)
    policies = contents["policies"]
    for metric in ("pass@1", "return"):
        team, control = (
            np.mean([policies[f"run_{seed}{end}"]["results"]["final"][metric]["mean"] for seed in (0, 1)])
            for end in ("", "_control")
        )
        difference = contents["control"]["single_agent"]["final"][metric]
        assert difference["mean"] == pytest.approx(team - control)
        assert difference["low"] <= difference["mean"] <= difference["high"]
    text = (compared / "evaluation.txt").read_text()
    assert "the team minus the trained control" in text and "Trainings of team and control:" in text
    assert "run_0_aux_silent" not in text


def test_an_agent_replaced_by_nothing_answers_nothing(compared):
    path = compared / "transcripts" / "run_0_aux_silent" / "transcripts.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == ITEMS * 4
    assert {record["turns"][0]["completions"]["aux"] for record in records} == {""}
    team = compared / "transcripts" / "run_0" / "transcripts.jsonl"
    whole = [json.loads(line) for line in team.read_text().splitlines()]
    mains = [[record["turns"][0]["completions"]["main"] for record in x] for x in (records, whole)]
    assert mains[0] == mains[1]  # the random numbers of an agent do not depend on its partner


def test_an_agent_that_was_not_trained_is_its_untrained_self(compared):
    contributions = report(compared)["contributions"]
    others = ("nothing", "the untrained agent", "another team's agent")
    assert set(contributions) == {f"{role} replaced by {by}" for role in ("aux", "main") for by in others}
    frozen = contributions["aux replaced by the untrained agent"]["final"]["return"]
    assert frozen == {"mean": 0.0, **dict.fromkeys(("low", "high", "t_low", "t_high"))}  # no spread, so no interval
    assert "the loss is the whole pass rate by construction" in (compared / "evaluation.txt").read_text()
    assert contributions["main replaced by the untrained agent"]["final"]["return"]["mean"] != 0.0


def test_a_control_that_is_there_is_not_trained_again(trained, compared, tmp_path, capsys):
    """A dry run says what a control costs that is not there yet."""
    weights = compared / "controls" / "run_0" / "agents" / "main" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    capsys.readouterr()
    arguments = (trained / "run_0", "--control", "single_agent", "--output_dir")
    evaluate(*arguments, compared)
    assert "Training the control" not in capsys.readouterr().out and weights.stat().st_mtime_ns == before
    states = {compared: "is there already", tmp_path / "x": "is trained at the cost of the run: 6 scored"}
    for folder, state in states.items():
        evaluate(*arguments, folder, "--dry_run")
        assert state in capsys.readouterr().out
    assert not (tmp_path / "x").exists()


def test_another_control_is_not_taken_for_this_one(trained, compared, tmp_path, refused):
    runs = [trained / "run_0", trained / "run_1"]
    other = trained / "base" / "agents" / "aux"
    for change, message in [
        (["centralized"], "control was single_agent, is centralized"),
        (["single_agent", "--control_model", other], f"is {other}"),
        (["single_agent", "--control_model", "./nowhere"], "no such folder"),
    ]:
        assert message in refused(evaluate, *runs, "--output_dir", compared, "--control", *change)


def test_a_dry_run_checks_the_run_of_the_control(trained, tmp_path, refused):
    """A control has one turn if it answers for all roles, and adapters of its own."""
    for change, control, message in (
        ({"num_turns": 2}, "centralized", "turn"),
        ({"agent_model": {"use_peft": True, "lora_target_modules": ["no"]}}, "single_agent", "lora_target_modules"),
    ):
        run = changed(trained, tmp_path / f"{control}_{message}", **change)
        model = str(trained / "base" / "agents" / "main")
        assert message in refused(
            evaluate, run, "--control", control, "--control_model", model, "--num_turns", "1", "--dry_run"
        )


def test_a_run_without_a_record_has_no_control(trained, tmp_path, refused):
    run = tmp_path / "run"
    shutil.copytree(trained / "run_0", run)
    settings = ("--control_model", trained / "base" / "agents" / "main", "--split", "test")
    for change, message in [
        (lambda: (run / "training_cost.json").write_text("{"), "training_cost.json is damaged"),
        ((run / "training_cost.json").unlink, "needs the cost of a complete run of an online algorithm"),
        ((run / "config.yaml").unlink, "needs the folder of a run, with its config.yaml"),
    ]:
        change()
        assert message in refused(
            evaluate, run, "--control", "single_agent", *settings, "--output_dir", tmp_path / "x"
        )


def test_one_agent_that_answers_for_all_roles_is_a_control(trained, tmp_path):
    argv = ("--override", "dataset.eval_size=1", "--output_dir", tmp_path / "results")
    evaluate(trained / "run_0", "--control", "centralized", *argv)
    control = tmp_path / "results" / "controls" / "run_0"
    assert AgentTeam.from_pretrained(control).roles == ("team",)
    settings = yaml.safe_load((control / "config.yaml").read_text())["magrpo"]
    assert settings["collaboration_mode"] == "centralized" and settings["max_completion_length"] == 12
    assert "return" in report(tmp_path / "results")["control"]["centralized"]["final"]
    argv = ("--split", "test", "--override", "dataset.eval_size=1", "--output_dir", tmp_path / "own")
    evaluate(control, *argv)  # such a run is evaluated by itself, too
    assert report(tmp_path / "own")["policies"]["run_0"]["results"]["final"]["return"]


def test_differences_of_pairs_are_resampled_together():
    config = EvaluationConfig(num_bootstraps=200, num_episodes=1)
    rng = np.random.default_rng(0)

    def result(values):
        return Result(None, {(FINAL, "return"): np.array(values)}, {}, {}, {}, ())

    items = rng.normal(size=(2, 50))
    extra = 1.0 + 1e-6 * rng.normal(size=(2, 50))
    pairs = [(result(row + more), result(row)) for row, more in zip(items, extra, strict=True)]  # common noise
    teams, others = zip(*pairs, strict=True)
    estimate = numbers_of(teams, config, others)[FINAL]["return"]
    assert estimate.mean == pytest.approx(1.0) and 0 < estimate.high - estimate.low < 1e-4


def test_a_cross_play_needs_several_roles():
    teams = SimpleNamespace(teams=[SimpleNamespace(name=x, location=x) for x in "ab"], max_completion_length=6)
    with pytest.raises(ConfigError, match="A cross-play needs several roles"):
        mixed_policies(teams, SimpleNamespace(roles=("solo",)))


def test_messages_are_not_ablated_beside_seats():
    """A seated environment keeps the messages of an episode itself, so the agents would still read them."""
    evaluation = SimpleNamespace(settings=SimpleNamespace(seats={"c": {}}), config=SimpleNamespace(num_turns=2))
    with pytest.raises(ConfigError, match=r"`evaluation.ablate: messages` cannot be combined with `seats`"):
        message_policies(evaluation, SimpleNamespace(roles=("a", "b")))


def test_messages_of_a_workflow_that_cannot_be_replayed_are_not_ablated():
    @workflow(roles=("a", "b"), live=True)
    async def run(item, agents):
        return float(len(await agents.b(await agents.a("Say:"))))

    evaluation = SimpleNamespace(settings=SimpleNamespace(seats={}), config=SimpleNamespace(num_turns=2), teams=[])
    with pytest.raises(ConfigError, match=r"`evaluation.ablate: messages` cannot be combined with `live=True`"):
        message_policies(evaluation, run)
    assert message_policies(evaluation, workflow(roles=("a", "b"))(run.run)) == []

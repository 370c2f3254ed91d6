"""`madpo` and `madpo_iter`: the phases of a run, and that an interrupted run goes on as if nothing had happened."""

import contextlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from scripts import algorithm_of

from trl_multiagent import FunctionEnvironment
from trl_multiagent.configs.recipes.demo.task import TASK as CODE_GENERATION
from trl_multiagent.runs.run import run_recipe
from trl_multiagent.runs.seeds import make_report, print_results
from trl_multiagent.trainers.madpo_config import MADPOConfig
from trl_multiagent.trainers.madpo_trainer import MADPOTrainer

from tiny import count_reward, same_teams, tiny_items, tiny_task


ROOT = Path(__file__).parents[2]
CONFIGS = [
    *(ROOT / "recipes" / "code_generation" / "configs").glob("madpo*.yaml"),
    *(ROOT / "tests" / "recipes" / "peer_configs").glob("madpo*.yaml"),
]
SMALL = ["--preference_num_candidates", "4", "--preference_pairs_per_sample", "2", "--max_completion_length", "6"]
SMALL += ["--disable_tqdm", "--per_device_train_batch_size", "4", "--logging_steps", "1", "--learning_rate", "1e-2"]
SMALL += ["--items_per_chunk", "2", "--save_steps", "1", "--report_to", "none"]
SMALL += ["--eval_strategy", "no", "--num_train_epochs", "1"]
scored = []  # numbers of joint answers that the reward was asked for


def reward(completions, **columns):
    scored.append(len(completions))
    return count_reward(completions, **columns)


def load_datasets(settings):
    return tiny_items(6), tiny_items(3) if settings.dataset.eval_split else None


TASK = replace(tiny_task(6, reward=reward), load_datasets=load_datasets)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scored.clear()


@pytest.fixture
def run(tiny_model):
    """Runs a recipe with a tiny model, in a folder."""

    def run(algorithm, folder, *argv, task=TASK):
        run_recipe(algorithm, task, ["--model_name", tiny_model, "--output_dir", str(folder), *SMALL, *argv], "run")

    return run


@contextlib.contextmanager
def killed(training, step):
    """Ends the n-th training that begins inside, before a step of it."""
    trainings = []
    train, compute_loss = MADPOTrainer.train, MADPOTrainer.compute_loss

    def counted(self, *args, **kwargs):
        trainings.append(self)
        return train(self, *args, **kwargs)

    def failing(self, *args, **kwargs):
        if len(trainings) == training and self.state.global_step == step:
            raise KeyboardInterrupt
        return compute_loss(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MADPOTrainer, "train", counted)
        patch.setattr(MADPOTrainer, "compute_loss", failing)
        yield


def interrupted(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_configuration_has_a_plan(config, tmp_path, capsys):
    algorithm = algorithm_of(config)
    run_recipe(algorithm, CODE_GENERATION, ["--config", str(config), "--dry_run"], "train")
    out = capsys.readouterr().out
    assert "Dry run" in out and "per optimizer step" in out and "candidates" in out
    assert ("rounds " in out) == (algorithm == "madpo_iter")
    assert list(tmp_path.iterdir()) == []


def test_wrong_preferences_are_one_line_before_anything_is_loaded(refused, run, tmp_path):
    Path("rows.csv").write_text("aux_prompt")
    texts = {"aux_prompt": "a", "aux_chosen": "b", "aux_rejected": "c", "main_prompt": "d", "main_chosen": "e"}
    Path("rows.jsonl").write_text(json.dumps(texts | {"main_rejected": None}))
    for flags in ([], ["--dry_run"]):
        for name, problem in (
            ("rows.csv", "There are no preferences in rows.csv. Give a folder"),
            ("rows.jsonl", "Row 0 of `rows.jsonl`: 'main_rejected' is None"),
            ("no/dataset", "Couldn't reach 'no/dataset' on the Hub"),
        ):
            line = refused(run, "madpo", "run", "--preference_dataset", name, *flags)
            assert line.startswith("run: error: ") and problem in line
    assert not Path("run").exists()
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    chat = {f"{r}_{side}": [{"role": x, "content": side}] for r in ("aux", "main") for side, x in roles.items()}
    Path("rows.jsonl").write_text(json.dumps(chat))
    assert "the tokenizer of 'aux' has no chat template" in refused(
        run, "madpo", "run", "--preference_dataset", "rows.jsonl"
    )


def test_a_folder_to_resume_from_is_looked_at_before_the_collection(refused, run, capsys):
    Path("checkpoint-1").mkdir()
    line = refused(run, "madpo", "run", "--resume_from_checkpoint", "checkpoint-1")
    assert "checkpoint-1 is not a complete checkpoint" in line and scored == []
    assert "cannot be a folder" in refused(run, "madpo_iter", "run", "--resume_from_checkpoint", "checkpoint-1")
    for value in ("auto", "false"):
        run("madpo_iter", "run", "--resume_from_checkpoint", value, "--dry_run")
        assert "Dry run" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["madpo", "madpo_iter"])
def test_a_push_without_permission_ends_the_run_before_the_collection(run, monkeypatch, algorithm):
    asked = []

    def refuse(*args, **options):
        asked.append((*args, *options.values()))
        raise RuntimeError("Cannot push to 'user/team': 403")

    monkeypatch.setattr("trl_multiagent.runs.rounds.open_repo", refuse)
    argv = ["--push_to_hub", "--hub_model_id", "user/team", "--hub_token", "hf_reader", "--hub_revision", "dev"]
    with pytest.raises(RuntimeError, match="403"):
        run(algorithm, "run", *argv)
    assert asked == [("user/team", None, "hf_reader", "dev", False)] and scored == []
    assert not Path("run/config.yaml").exists()


def test_the_last_team_is_pushed_with_the_token_of_the_run(run, monkeypatch):
    pushed = []
    monkeypatch.setattr("trl_multiagent.runs.rounds.open_repo", lambda *args, **options: None)
    monkeypatch.setattr(MADPOTrainer, "push_to_hub", lambda self, **_: pushed.append(self.args))
    argv = ["--push_to_hub", "--hub_model_id", "user/team", "--hub_token", "hf_writer", "--max_steps", "1"]
    run("madpo_iter", "run", *argv, "--num_iterations", "1", "--comparator_policy", "current")
    assert [(args.hub_token, args.output_dir) for args in pushed] == [("hf_writer", "run")]
    assert "hf_writer" not in Path("run/config.yaml").read_text()


def test_madpo_collects_once_and_trains_once(run, capsys, tiny_model, tmp_path):
    argv = ["--override", "dataset.eval_split=test", "--eval_strategy", "epoch", "--save_strategy", "no"]
    run("madpo", "run", *argv)
    assert sum(scored[:3]) == 6 * 4  # the collection, before the evaluation
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["madpo"]["preference_num_candidates"] == 4
    results = json.loads(Path("run/results.json").read_text())
    assert results["collection"]["candidates_scored"] == 24 and results["env_step"] > 0
    card = Path("run/README.md").read_text()
    assert "MADPO" in card and "preference pairs" in card
    assert "'eval_reward'" in capsys.readouterr().out
    before = len(scored)
    run("madpo", "run", *argv)
    assert "is complete" in capsys.readouterr().out and len(scored) == before
    with pytest.raises(SystemExit):
        run("madpo", "run")
    error = capsys.readouterr().err
    assert "run holds another run: dataset.eval_split was test, is not set; madpo.eval_strategy was epoch" in error
    assert "Choose another folder, or set `madpo.resume_changes: allow`" in error
    # A kill between the team and the results, from which no checkpoint is left
    shutil.copytree("run", "killed")
    Path("killed/results.json").unlink()
    run("madpo", "killed", *argv)
    assert len(scored) > before and same_teams("run", "killed")
    before = len(scored)
    with pytest.raises(SystemExit):
        fewer = replace(
            TASK, load_datasets=lambda settings: [rows.select(range(3)) for rows in load_datasets(settings)]
        )
        run("madpo", "run", *argv, task=fewer)
    assert "run holds another run: rows of the dataset was " in capsys.readouterr().err
    shutil.copytree("run", "other")
    Path("other/stage.json").unlink()
    with pytest.raises(SystemExit):
        run("madpo", "other")
    assert "other has the team and the report of an earlier run" in capsys.readouterr().err and len(scored) == before
    # The same preferences, given as a dataset
    run("madpo", "again", "--preference_dataset", "run/_preferences")
    assert len(scored) == before and same_teams("run", "again")


def test_a_killed_run_goes_on(run, capsys):
    form = ["--override", "peft.r=2"]
    run("madpo", "whole", *form)
    number = sum(scored)
    for step in (0, 2):
        with killed(training=1, step=step):
            run("madpo", "killed", *form)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(MADPOConfig, "world_size", 2)
        run("madpo", "killed", *form)
    assert "number of processes: 1 in the checkpoint, 2 in this run" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):  # after the training
        patch.setattr("trl_multiagent.runs.training.save_results", interrupted)
        run("madpo", "killed", *form)
    scored.clear()
    run("madpo", "killed", *form)
    assert scored == [] and number == 24
    assert same_teams("whole", "killed")


ITERATIVE = ["--num_iterations", "2", "--preference_replay_mode", "all", "--comparator_policy", "history"]


def test_rounds(run, capsys):
    run("madpo_iter", "whole", *ITERATIVE, "--override", "dataset.eval_split=test")
    assert "held-out reward" in capsys.readouterr().out
    results = [json.loads(Path(f"whole/_rounds/round_{k}/results.json").read_text()) for k in range(2)]
    facts = [result["iter"] for result in results]
    assert [one["current_iteration"] for one in facts] == [1, 2]
    assert [one["candidates_scored"] for one in facts] == [48, 96]
    assert facts[1]["total_preference_pairs"] == sum(one["current_preference_pairs"] for one in facts)
    assert all(one["train_preference_pairs"] == one["current_preference_pairs"] for one in facts)
    assert any("iter/total_preference_pairs" in entry for entry in results[1]["log_history"])
    assert results[0]["env_step"] < results[1]["env_step"]
    teams = [Path(f"whole/_rounds/teams/round_{k}") for k in range(3)]
    assert same_teams(teams[2], "whole") and not same_teams(teams[1], teams[2]) and not same_teams(teams[0], teams[1])
    assert "whole/_rounds" not in Path("whole/README.md").read_text()
    print_results([Path("whole")])  # as of several seeds: those of the last round
    assert Path("report.html").is_file() and make_report(["whole"]) == Path("whole/report.html")

    argv = [*ITERATIVE, "--override", "dataset.eval_split=test"]
    for training, step in ((1, 2), (2, 1)):
        with killed(training, step):
            run("madpo_iter", "killed", *argv)
    run("madpo_iter", "killed", *argv)
    assert same_teams("whole", "killed")
    again = [json.loads(Path(f"killed/_rounds/round_{k}/results.json").read_text()) for k in range(2)]
    assert [one["eval"]["reward"] for one in again] == [one["eval"]["reward"] for one in results]
    for one in again:  # facts about a round are logged once, however often its training goes on
        assert sum("iter/current_iteration" in entry for entry in one["log_history"]) == 1

    shutil.copytree("killed", "copied")
    scored.clear()
    run("madpo_iter", "copied", *argv)
    run("madpo_iter", "killed", *argv)
    assert "is complete" in capsys.readouterr().out and scored == []
    longer = ["3" if x == "2" else x for x in argv]  # one more round
    run("madpo_iter", "killed", *longer)
    assert Path("killed/_rounds/teams/round_3/team.json").is_file()
    Path("killed/_rounds/round_2/results.json").unlink()
    results = Path("killed/_rounds/round_1/results.json")
    whole = results.read_text()
    results.write_text(whole[:9])
    with pytest.raises(SystemExit) as refused:
        run("madpo_iter", "killed", *longer)
    assert refused.value.code == 2 and "round_1/results.json is damaged: " in capsys.readouterr().err
    results.write_text(whole)
    with pytest.raises(SystemExit):
        run("madpo_iter", "killed", *argv, "seed=3")
    assert "holds another run: seed was not set, is 3." in capsys.readouterr().err


class Ascending(FunctionEnvironment):
    """An environment with a state: how often it has scored decides which answers it prefers."""

    calls = 0

    def __init__(self):
        super().__init__({"aux": "Help with {x}:", "main": "Do {x}:"}, count_reward)

    def score(self, *args):
        self.calls += 1
        outcomes = super().score(*args)
        return [replace(x, reward=x.reward * math.cos(self.calls)) for x in outcomes]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_rounds_go_on_with_an_environment_that_has_a_state(run):
    task = replace(TASK, make_environment=lambda settings: Ascending())
    run("madpo_iter", "whole", *ITERATIVE, task=task)
    with killed(training=1, step=1):
        run("madpo_iter", "killed", *ITERATIVE, task=task)
    run("madpo_iter", "killed", *ITERATIVE, task=task)
    assert same_teams("whole", "killed")


def test_a_collection_without_pairs_is_an_error(run, capsys):
    task = tiny_task(6, reward=lambda completions, **columns: [1.0 for _ in completions])
    with pytest.raises(SystemExit):
        run("madpo", "run", task=task)
    assert "run: error: The collection in run/_preferences has no pairs" in capsys.readouterr().err


def test_a_round_without_pairs_learns_from_earlier_ones_or_ends(run, capsys):
    def flat_later(completions, **columns):
        scored.append(len(completions))
        return [1.0 for _ in completions] if len(scored) > 6 else count_reward(completions, **columns)

    task = tiny_task(6, held_out=0, reward=flat_later)
    with pytest.raises(SystemExit):
        run("madpo_iter", "run", "--num_iterations", "2", task=task)
    assert "The team before this round is in run/_rounds/teams/round_1." in capsys.readouterr().err
    argv = ["--num_iterations", "3", "--preference_replay_mode", "all", "--preference_replay_sample_size", "4"]
    scored.clear()
    run("madpo_iter", "replayed", *argv, task=task)
    for number in (1, 2):
        results = json.loads(Path(f"replayed/_rounds/round_{number}/results.json").read_text())
        assert results["collection"]["pairs"] == 0 and results["iter"]["train_preference_pairs"] == 4

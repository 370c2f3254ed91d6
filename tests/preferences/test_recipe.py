"""`trl-multiagent collect` and `run_collection`: settings, plan, a collection with a tiny model."""

import pytest

from trl_multiagent import cli
from trl_multiagent.preferences import load_preferences
from trl_multiagent.runs.collection import make_config, run_collection
from trl_multiagent.runs.run import read_settings

from tiny import tiny_task


TASK = tiny_task(6, held_out=0)


def parse(*argv):
    return make_config(read_settings("madpo", TASK, ["--model_name", "m", *argv], "collect"))


def test_sections_of_madpo():
    config = parse(
        *("--override", "madpo.pair_selection=random", "agent_model.temperature=0.7", "seed=3"),
        *("reward_processor.scale_factor=2", "reward_processor.shift=-4", "madpo.max_new_tokens=9"),
        *("--preference_num_candidates", "5", "--preference_pairs_per_sample", "null", "--num_train_epochs", "2"),
    )
    assert (config.pair_selection, config.temperature, config.seed) == ("random", 0.7, 3)
    assert (config.reward_scale, config.reward_shift, config.max_completion_length) == (2, -4, 9)
    assert (config.preference_num_candidates, config.preference_pairs_per_sample) == (5, None)


@pytest.mark.parametrize(
    ("argv", "folder"),
    [
        ([], "outputs/preferences"),
        (["--output_base_dir", "here"], "here/preferences"),
        (["--output_dir", "run", "--output_base_dir", "here"], "run/preferences"),
        (["--preference_dataset", "data", "--output_dir", "run"], "data"),
    ],
)
def test_folder(argv, folder):
    assert parse(*argv).output_dir == folder


def test_the_plan_says_what_it_costs_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["--model_name", "m", "--dry_run", "--preference_num_candidates", "10", "--max_completion_length", "100"]
    run_collection(TASK, [*argv, "--items_per_chunk", "4"])
    out = capsys.readouterr().out
    assert "to score         60 joint answers" in out
    assert "of 12000 tokens at most" in out
    assert "folder           outputs/preferences" in out
    run_collection(TASK, [*argv, "--comparator_policy", "current"])
    out = capsys.readouterr().out
    assert "120 joint answers" in out and "24000 tokens" in out
    assert list(tmp_path.iterdir()) == []


def test_a_collection(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["--model_name", tiny_model, "--preference_num_candidates", "4", "--max_completion_length", "6"]
    argv += ["--disable_tqdm", "--override", "output.base_dir=here", "peft.r=2"]
    run_collection(TASK, argv, prog="collect")
    preferences = load_preferences("here/preferences", ("aux", "main"))
    assert f"Saved {len(preferences)} preferences in here/preferences" in capsys.readouterr().out
    run_collection(TASK, argv, prog="collect")  # is complete
    with pytest.raises(SystemExit) as exit_info:
        run_collection(TASK, [*argv, "seed=1"], prog="collect")
    error = "collect: error: here/preferences holds another collection"
    assert exit_info.value.code == 2 and error in capsys.readouterr().err


def test_the_command_runs_here_or_launches_processes(monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["collect", "--help"])
    out = capsys.readouterr().out
    assert exit_info.value.code == 0 and "usage: trl-multiagent collect" in out
    argv = ["--config", "madpo_demo", "--dry_run"]
    cli.main(["collect", *argv])
    out = capsys.readouterr().out
    assert "16 per item, each of 2 completions" in out and "aux: demo, main: demo" in out
    launched = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
    cli.main(["collect", "--num_processes", "2", *argv])
    assert launched[0].num_processes == 2 and launched[0].training_script_args == ["collect", *argv]

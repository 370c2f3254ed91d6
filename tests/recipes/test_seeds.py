"""
Several seeds and named experiments. The trainings themselves are replaced by a script that writes down how it was
started.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from trl_multiagent import cli
from trl_multiagent.runs.run import make_parser, read_layers
from trl_multiagent.runs.seeds import experiments
from trl_multiagent.settings.read import RECIPES, config_file

from pages import read_page


# Fails once for seed 1, after a checkpoint; an evaluation succeeds
SCRIPT = """#!{python}
import json, os, pathlib, sys
sys.path.append({helpers!r})
from pages import write_run
arguments = sys.argv[3:]
with open("calls.jsonl", "a") as file:
    file.write(json.dumps(arguments) + "\\n")
if arguments[0] == "train":
    folder = pathlib.Path(arguments[arguments.index("--output_dir", arguments.index("--seed")) + 1])
    if folder.name == "seed_1" and not folder.exists():
        (folder / "checkpoint-2").mkdir(parents=True)
        sys.exit(3)
    if folder.name == "seed_9":
        os.kill(os.getpid(), 9)
    seed = int(folder.name.removeprefix("seed_"))
    write_run(folder, seed, [0.0, seed])
"""
HELPERS = str(Path(__file__).parents[1] / "helpers")


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    path = tmp_path / "python"
    path.write_text(SCRIPT.format(python=sys.executable, helpers=HELPERS))
    path.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(path))
    monkeypatch.chdir(tmp_path)


def run(*argv):
    """Runs a command. Returns its exit status, and the arguments of all commands that were started so far."""
    try:
        cli.main([*argv])
        status = 0
    except SystemExit as error:
        status = error.code or 0
    with open("calls.jsonl", "a+") as file:
        file.seek(0)
        return status, [json.loads(line) for line in file]


TRAIN = ("train", "magrpo", "--task", "needed", "--config", "needed_rule")


def test_seeds_go_on_after_a_failure(capsys):
    status, calls = run(*TRAIN, "--seeds", "0,1,2")
    folders = [f"outputs/needed_rule/needed_rule_seeds/seed_{seed}" for seed in range(3)]
    flags = [["--seed", str(k), "--output_dir", x] for k, x in enumerate(folders)]
    same = [*TRAIN, "--resume_from_checkpoint", "auto"]
    assert status == 3 and calls == [same + flags[0], same + flags[1]]  # no run starts after one has failed
    assert "ended with status 3" in capsys.readouterr().err

    status, calls = run(*TRAIN, "--seeds", "0,1,2,3", "--jobs", "2", "--num_processes", "2")
    new = {call[call.index("--seed") + 1]: call for call in calls[2:]}
    assert status == 0 and len(calls) == 5 and new.keys() == {"1", "2", "3"}
    assert new["1"][2] == "--num_processes=2"
    output = capsys.readouterr().out
    assert f"evaluate {' '.join(folders)}" in output
    # The standard error is 0.645, and with 3 degrees of freedom the quantile is 3.182
    assert re.search(r"reward +1\.500 \[-0\.554, 3\.554\] \(n = 4\)\n", output)
    report = Path(folders[0]).parent / "report.html"
    assert f"Report           {report}\n" in output and len(read_page(report)["runs"]) == 4

    status, calls = run(*TRAIN, "--seeds", "0,1", "--max_steps", "7")
    assert status == 2 and len(calls) == 5
    assert "magrpo.max_steps was 200, is 7. Choose another --output_dir" in capsys.readouterr().err


def test_complete_runs_are_skipped_and_signals_named(capsys):
    more = ("--override", "output.save_path=team", "seed=4", "--max_steps", "3", "--hub_token", "hf_secret")
    assert run(*TRAIN, *more, "--output_dir", "runs", "--seeds", "9")[0] == 128 + 9
    assert "a run ended by SIGKILL" in capsys.readouterr().err
    assert run(*TRAIN, *more, "--output_dir", "runs", "--seeds", "0")[0] == 0
    status, calls = run(*TRAIN, "--output_dir=runs", *more, "--output_dir", "runs", "--seeds", "0,2")
    assert status == 0 and [call[call.index("--seed") + 1] for call in calls] == ["9", "0", "2"]
    # Each team is saved in the folder of its run: of a flag that is given twice, the last one counts
    assert "hf_secret" in calls[2] and "hf_secret" not in Path("runs/stage.json").read_text()
    assert calls[2][-6:] == ["--output.save_path", "null", "--seed", "2", "--output_dir", "runs/seed_2"]
    arguments, _ = make_parser("magrpo").parse_known_args([])
    layers = read_layers("magrpo", arguments, [*calls[2][-2:], "--output_dir=x"])
    assert layers[2] == {"magrpo": {"output_dir": "x"}}


def test_the_teams_of_rounds_are_in_the_folder_of_their_run():
    argv = ("train", "madpo_iter", "--config", "madpo_iter_demo", "--policy_checkpoint_dir", "teams")
    assert run(*argv, "--seeds", "0,1", "--dry_run")[1][0][-6:-4] == ["--policy_checkpoint_dir", "null"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seeds", "0,0"), "not a list of distinct seeds"),
        (("--seeds", "1,01"), "not a list of distinct seeds"),
        (("--seeds", "0,x"), "not a list of distinct seeds"),
        (("--seeds", "0,1", "--seed=3"), "--seed cannot be combined with --seeds"),
        (("--jobs", "3"), "give --seeds, too"),
        (("--seeds", "0", "--resume_from_checkpoint", "true"), "goes on by itself"),
    ],
)
def test_flags_that_do_not_fit(flags, message, capsys):
    assert run(*TRAIN, *flags) == (2, [])
    assert message in capsys.readouterr().err


def test_reproduce(capsys):
    status, calls = run("reproduce", "needed", "--seeds", "0,2", "--max_steps", "3")
    folder = "outputs/reproduce/needed"
    assert status == 0 and [call[0] for call in calls] == ["train", "train", "evaluate"]
    assert ["--max_steps", "3"] == calls[1][calls[1].index("--max_steps") :][:2]
    teams = [f"{folder}/seed_0", f"{folder}/seed_2"]
    flags = "--num_episodes 1 --ablate messages --output_dir".split()
    assert calls[2] == ["evaluate", *teams, *flags, f"{folder}/evaluation"]
    output, report = capsys.readouterr().out, Path(folder) / "report.html"
    assert f"Report           {report}\n" in output and len(read_page(report)["runs"]) == 2
    assert re.search(r"best team without messages, exact +0\.25", output)
    assert run("reproduce", "neded")[0] == 2
    assert "choose one of demo, needed" in capsys.readouterr().err


def test_experiments_name_configurations(capsys):
    for name, experiment in experiments().items():
        arguments = experiment["train"].split()
        assert config_file("--config", arguments[arguments.index("--config") + 1], RECIPES)
        assert len({len(row) for row in experiment.get("published", [[]])}) == 1, name
    run("reproduce")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*experiments()]

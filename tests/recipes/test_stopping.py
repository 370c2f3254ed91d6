"""Ctrl-C and SIGTERM end a recipe with one line that says how to go on."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pairs import pairs

from trl_multiagent import Task, workflow
from trl_multiagent.jobs import event_loop, signals
from trl_multiagent.jobs.signals import (
    COMMAND_VARIABLE,
    REQUEST,
    Request,
    closing_at_exit,
    end_on_signal,
    ending_later,
)
from trl_multiagent.rollout.sampler import TeamSampler
from trl_multiagent.runs.collection import run_collection
from trl_multiagent.runs.evaluation import run_evaluation
from trl_multiagent.runs.run import run_recipe
from trl_multiagent.trainers.joint_reward_trainer import JointRewardTrainer
from trl_multiagent.trainers.madpo_trainer import MADPOTrainer
from trl_multiagent.trainers.magrpo_trainer import MAGRPOTrainer

from pages import read_page
from tiny import count_reward, flip, same_teams, tiny_items, tiny_task, tiny_team


SMALL = ["--disable_tqdm", "--report_to", "none", "--logging_steps", "1", "--max_completion_length", "6"]
SAVING = ["--save_strategy", "steps", "--save_steps", "100"]
ROLLOUTS = [*SMALL, "--max_steps", "4", "--items_per_device", "2", "--learning_rate", "1e-2"]
PAIRS = [*SMALL, "--preference_num_candidates", "4", "--per_device_train_batch_size", "4", "--num_train_epochs", "1"]
PAIRS += ["--preference_pairs_per_sample", "2", "--eval_strategy", "no", "--learning_rate", "1e-2"]
TASK = tiny_task(6, held_out=0)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    yield
    assert Request() == REQUEST


@pytest.fixture
def signalled(monkeypatch, capsys):
    """Runs a program that gets a signal in an optimizer step, and returns its line."""

    def signalled(number, trainer, step, program, *arguments, method="training_step") -> str:
        original = getattr(trainer, method)

        def receiving(self, *args, **kwargs):
            if trainer is None or self.state.global_step == step - 1:
                os.kill(os.getpid(), number)
            return original(self, *args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(trainer, method, receiving)
            program(*arguments)
        assert ended.value.code == 128 + number
        err = capsys.readouterr().err
        (line,) = [line for line in err.splitlines() if line.startswith("run: ended")]
        assert "Traceback" not in err
        return line

    return signalled


def test_a_training_on_rollouts(signalled, tiny_model, monkeypatch, capsys, reports):
    def run(folder, *argv):
        argv = ["--model_name", tiny_model, *ROLLOUTS, "--output_dir", folder, *argv]
        run_recipe("magrpo", TASK, argv, "run")

    run("whole", *SAVING, "--resume_from_checkpoint", "auto")  # there is none yet
    monkeypatch.setenv(COMMAND_VARIABLE, "trl-multiagent train magrpo --config x.yaml")
    line = signalled(signal.SIGTERM, MAGRPOTrainer, 2, run, "ended", *SAVING)
    assert line.startswith(
        "run: ended by SIGTERM after step 2 of 4, which is saved. Go on with: trl-multiagent train "
    )
    assert line.endswith(" train magrpo --config x.yaml --resume_from_checkpoint ended/checkpoint-2")
    assert not Path("ended/team.json").exists()
    assert read_page(Path("ended/report.html"))["facts"]["step"] == 2
    capsys.readouterr()
    run("ended", *SAVING, "--dry_run")
    assert "run: note: ended/checkpoint-2 is not used: this run starts at step 0. " in capsys.readouterr().err
    run("ended", *SAVING, "--resume_from_checkpoint", "auto")
    assert same_teams("whole", "ended")
    line = signalled(signal.SIGINT, MAGRPOTrainer, 2, run, "off", "--save_strategy", "no")
    assert "after step 2 of 4, without a checkpoint, because `save_strategy` is 'no'. Start again with: " in line
    assert read_page(Path("off/report.html"))["facts"]["step"] == 2
    assert not Path("off/team.json").exists() and not list(Path("off").glob("checkpoint-*"))
    with monkeypatch.context() as patch:  # the last step: the training is complete
        step = MAGRPOTrainer.training_step

        def ended(self, *args):
            if self.state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, *args)

        patch.setattr(MAGRPOTrainer, "training_step", ended)
        run("last", *SAVING)
    assert same_teams("whole", "last")


@pytest.mark.parametrize("algorithm", ["madpo", "madpo_iter"])
def test_trainings_on_preferences(signalled, tiny_model, algorithm, capsys):
    def run(folder, *argv):
        rounds = ["--num_iterations", "2"] if algorithm == "madpo_iter" else []
        argv = ["--model_name", tiny_model, *PAIRS, *SAVING, *rounds, *argv]
        run_recipe(algorithm, TASK, [*argv, "--output_dir", folder], "run")

    run("whole")
    line = signalled(signal.SIGTERM, MADPOTrainer, 2, run, "ended")
    assert line.startswith("run: ended by SIGTERM after step 2 of ") and line.endswith("Go on with: the same command")
    assert not list(Path("ended").rglob("results.json")) and not Path("ended/team.json").exists()
    (optimizer,) = Path("ended").rglob("checkpoint-2/optimizer.pt")
    flip(optimizer)
    with pytest.raises(SystemExit) as refused:
        run("ended")
    assert refused.value.code == 2
    assert "checkpoint-2 is damaged: missing, or changed since it was saved: optimizer.pt." in capsys.readouterr().err
    flip(optimizer)
    run("ended")
    assert same_teams("whole", "ended")


def test_a_collection_ends_at_once_and_goes_on(tiny_model, monkeypatch, capsys):
    calls = []

    def reward(completions, **columns):
        calls.append(len(completions))
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return count_reward(completions, **columns)

    def leave(code):  # this process must not end
        codes.append(code)
        raise KeyboardInterrupt

    codes = []
    monkeypatch.setattr(os, "_exit", leave)
    task = tiny_task(6, held_out=0, reward=reward)
    argv = ["--model_name", tiny_model, *PAIRS, "--items_per_chunk", "2"]
    with pytest.raises(KeyboardInterrupt):
        run_recipe("madpo", task, argv, "run")
    err = capsys.readouterr().err
    assert codes == [130] and "Traceback" not in err
    (folder,) = Path("output").glob("job_*") if Path("output").is_dir() else Path("outputs").glob("job_*")
    assert err.splitlines()[-1] == f"run: ended by Ctrl-C. Go on with: the same command --output_dir {folder}"
    run_recipe("madpo", task, [*argv, "--output_dir", str(folder), "--max_steps", "1"], "run")
    assert calls == [8, 8, 8, 8]  # the second chunk again
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        run_collection(task, argv, "run")
    assert codes == [130, 130]


def test_a_reward_model_and_the_phases_of_marlhf(signalled, tiny_model, capsys):
    pairs(("aux", "main")).save_to_disk("pairs")
    given = ["--preference_dataset", "pairs"]
    given += ["--override", "reward_model.save_strategy=steps", "reward_model.save_steps=100"]
    argv = ["--model_name", tiny_model, *given, "--output_dir", "judge", "--disable_tqdm"]
    line = signalled(signal.SIGTERM, JointRewardTrainer, 1, run_recipe, "reward_model", TASK, argv, "run")
    assert line.endswith("which is saved. Go on with: the same command") and Path("judge/checkpoint-1").is_dir()
    assert not Path("judge/complete.json").exists()
    run_recipe("reward_model", TASK, argv, "run")
    assert Path("judge/complete.json").exists() and "Reward model in judge" in capsys.readouterr().out
    argv = ["--model_name", tiny_model, *ROLLOUTS, *SAVING, "--preference_num_candidates", "4"]
    argv += ["--preference_pairs_per_sample", "2", "--output_dir", "run"]
    for trainer in (JointRewardTrainer, MAGRPOTrainer):
        signalled(signal.SIGINT, trainer, 1, run_recipe, "marlhf", TASK, argv, "run")
        assert not Path("run/results.json").exists()
    run_recipe("marlhf", TASK, argv, "run")
    assert Path("run/results.json").exists()


HELD = set()


@workflow(roles=("aux", "main"), live=True)
async def holding(item, agents):
    HELD.add(agents)
    try:
        await agents.aux("Begin:")
        await agents.main("Go on:")
        return 1.0
    finally:
        await asyncio.sleep(0)
        HELD.remove(agents)


@pytest.mark.parametrize("command", ["evaluate", "train"])
def test_what_episodes_hold_is_closed_when_a_program_ends_at_once(tiny_model, monkeypatch, command):
    """At the first Ctrl-C in an evaluation, and at the second one in a training."""

    def leave(code):  # this process must not end
        left.append((code, len(HELD)))
        raise KeyboardInterrupt

    def sample(self, nodes, number):
        held.append(len(HELD))
        for _ in range(1 if command == "evaluate" else 2):
            signal.raise_signal(signal.SIGINT)
        return original(self, nodes, number)

    original, held, left = TeamSampler.__call__, [], []
    monkeypatch.setattr(TeamSampler, "__call__", sample)
    monkeypatch.setattr(os, "_exit", leave)
    task = Task(lambda settings: holding, lambda settings: (tiny_items(2), tiny_items(2)))
    tiny_team().save_pretrained("team")
    with pytest.raises(KeyboardInterrupt):
        if command == "evaluate":
            run_evaluation(task, ["team", "--num_episodes", "2"], "run")
        else:
            argv = ["--branching", "episodes", "--num_generations", "2", "--output_dir", "run"]
            run_recipe("magrpo", task, ["--model_name", tiny_model, *ROLLOUTS, *argv], "run")
    assert held == [4] and left == [(130, 0)]


@pytest.mark.parametrize("where", ["reward", "workflow"])
def test_code_of_a_task_that_blocks_costs_its_step(tiny_model, monkeypatch, capsys, where):
    monkeypatch.setattr(signals, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(event_loop, "ANSWER_SECONDS", 0.2)
    calls, blocks, release = [], [], threading.Event()

    def block():
        calls.append(None)
        if blocks and len(calls) > 6:  # in the second step
            os.kill(os.getpid(), signal.SIGTERM)
            release.wait(60)

    def reward(completions, **columns):
        for _ in completions:
            block()
        return count_reward(completions, **columns)

    @workflow(roles=("aux", "main"))
    async def run(item, agents):
        answer = await agents.main(f"{item['x']}:")
        block()
        return float(len(set(answer)))

    task = tiny_task(6, held_out=0, reward=reward)
    if where == "workflow":
        task = Task(lambda settings: run, lambda settings: (tiny_items(6), None))
    argv = ["--model_name", tiny_model, *ROLLOUTS, *SAVING, "--num_generations", "2", "--num_turns", "1"]
    run_recipe("magrpo", task, [*argv, "--output_dir", "whole"], "run")
    calls.clear(), blocks.append(True)
    with pytest.raises(SystemExit) as ended:
        run_recipe("magrpo", task, [*argv, "--output_dir", "ended"], "run")
    release.set(), blocks.clear()
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 143 and line.startswith("run: ended by SIGTERM after step 1 of 4, which is saved. Go")
    run_recipe("magrpo", task, [*argv, "--output_dir", "ended", "--resume_from_checkpoint", "auto"], "run")
    assert same_teams("whole", "ended")


def test_a_clean_up_that_blocks_is_left(monkeypatch):
    monkeypatch.setattr(sys.modules["trl_multiagent.environments.workflow"], "CLOSING_SECONDS", 0.2)
    monkeypatch.setattr(event_loop, "ANSWER_SECONDS", 0.2)
    release, ended = threading.Event(), []

    @workflow(roles=("aux",), live=True)
    async def run(item, agents):
        try:
            await agents.aux("Begin:")
        finally:
            ended.append(release.wait(5))

    with run.playing(1, are_episodes=True):
        run.prompts({"x": 1}, [])
    assert ended == []
    release.set()


def test_a_second_ctrl_c_ends_at_once(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with end_on_signal("run"), ending_later():
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert codes == [130]
    assert capsys.readouterr().err == "run: ended by Ctrl-C. Go on with: the same command\n"


def test_a_second_sigterm_does_not_cut_the_clean_up(monkeypatch, capsys):
    """A scheduler sends one to all processes, and a launcher sends one more to its own."""
    codes, closed = [], []

    def close():
        os.kill(os.getpid(), signal.SIGTERM)
        closed.append(codes.copy())

    monkeypatch.setattr(os, "_exit", codes.append)
    with end_on_signal("run"), closing_at_exit(close):
        os.kill(os.getpid(), signal.SIGTERM)
    assert closed == [[]] and codes == [143] and len(capsys.readouterr().err.splitlines()) == 1


# Launches its first argument, and gets a signal
LAUNCHER = """
import os, signal, subprocess, sys
from trl_multiagent.jobs.signals import leaving_signals_to_children

with leaving_signals_to_children():
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
    child.stdout.readline()
    os.kill(os.getpid(), int(sys.argv[2]))
    assert child.wait() == 143
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_waits_for_what_it_has_launched(number):
    """In a process of its own, whose only child is the program: SIGTERM goes to all children."""
    program = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *args: sys.exit(143))\nprint()\ntime.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", LAUNCHER, program, str(int(number))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Runs its arguments as programs, one after the other
SEEDS = """
import sys
from pathlib import Path
from trl_multiagent.runs.seeds import run_all

commands = {f"seed_{k}": [sys.executable, "-c", program] for k, program in enumerate(sys.argv[1:])}
print(run_all(commands, 1, print, Path()))
"""


def test_no_other_seed_starts_after_a_signal(forked, tmp_path):
    """Also if the run of the first seed was in its last step and is complete."""
    first = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getppid(), "
        "15)\ntime.sleep(0.3)"
    )
    script = tmp_path / "seeds.py"
    script.write_text(SEEDS)
    done = forked.run(script, first, "print('other')")
    assert done.stdout.splitlines() == ["seed_0: complete", "seed_0", "-15"], done.stderr


# Starts a run, which kills it
KILLED = """
import sys
from pathlib import Path
from trl_multiagent.runs.seeds import run_all

program = "import os,sys,time; open(sys.argv[1], 'w').write(f'{os.getpid()}'); os.kill(os.getppid(), 9); time.sleep(9)"
run_all({"seed_0": [sys.executable, "-c", program, sys.argv[1]]}, 1, print, Path())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_seeds_end_with_the_program_that_started_them(forked, tmp_path):
    (tmp_path / "seeds.py").write_text(KILLED)
    done = forked.run(tmp_path / "seeds.py", tmp_path / "run")
    assert done.codes == [-signal.SIGKILL], done.stderr
    status = Path(f"/proc/{(tmp_path / 'run').read_text()}/stat")
    for _ in range(200):
        if not status.is_file() or status.read_text().rpartition(") ")[2].startswith("Z"):
            return
        time.sleep(0.05)
    raise AssertionError("a run has no parent, and still runs")

"""
A run that is killed and resumed gives the same results as an uninterrupted one. A checkpoint of another run is
refused.
"""

import importlib.util
import json
import math
import os
import shutil
import signal
from pathlib import Path

import pandas
import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from trl_multiagent import AgentTeam, FunctionEnvironment, MAGRPOTrainer, MARLOOConfig, MARLOOTrainer
from trl_multiagent.report.trace_files import read_trace
from trl_multiagent.trainers.base.checkpoints import (
    STATE_FILE,
    UNFINISHED_FOLDER,
    read_checkpoint,
    rotate,
    verify_checkpoint,
)

from tiny import (
    EVALUATED,
    SAVED,
    byte_tokenizer,
    count_reward,
    feedback,
    flip,
    same_teams,
    tiny_environment,
    tiny_items,
    tiny_llama,
    tiny_team,
    tiny_trainer,
)


SCRIPT = Path(__file__).parents[1] / "helpers" / "killed_runs.py"
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def run(forked):
    """Runs `killed_runs.train` to its end, or to the death of a process, and gives the exit codes."""

    def run(folder, settings, processes=1, zero=None, **plan) -> list[int]:
        folder.mkdir(parents=True, exist_ok=True)
        plan = {name: str(value) if isinstance(value, Path) else value for name, value in plan.items()}
        plan = json.dumps({"folder": str(folder), "settings": settings, **plan})
        finished = forked.run(SCRIPT, plan, processes=processes, zero=zero)
        (folder / "output.txt").write_text(finished.stdout[-3000:] + finished.stderr[-6000:])
        return finished.codes

    return run


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """Uninterrupted runs, by their settings."""
    finished = {}

    def whole(settings, **plan):
        key = (settings, *map(str, plan.values()))
        if key not in finished:
            folder = tmp_path_factory.mktemp("whole") / settings
            operations = {"kill": ("write", 0)} if settings == "plain" else {}
            codes = run(folder, settings, result=folder.with_suffix(".pt"), **operations, **plan)
            assert set(codes) == {0}, output_of(folder)
            finished[key] = folder
        return finished[key]

    return whole


def output_of(folder):
    return (folder / "output.txt").read_text()


def result_of(folder):
    return torch.load(folder.with_suffix(".pt"), weights_only=False)


def timeless(entry):
    timed = ("time/", "runtime", "per_second", "step_time")
    return {name: x for name, x in entry.items() if not any(word in name for word in timed)}


def check_same(left, right):
    """Two runs ended with the same weights, bit for bit, and wrote the same log."""
    one, other = result_of(left), result_of(right)
    assert one["weights"].keys() == other["weights"].keys()
    assert all(torch.equal(x, other["weights"][name]) for name, x in one["weights"].items())
    assert [timeless(entry) for entry in one["log"]] == [timeless(entry) for entry in other["log"]]
    for name in ("env_step", "num_tokens", "train_loss", "distribution", "processes"):
        assert one[name] == other[name], name
    assert (one["best"] and Path(one["best"]).name) == (other["best"] and Path(other["best"]).name)


def resume_and_compare(run, uninterrupted, folder, settings, **plan):
    codes = run(folder, settings, resume=True, result=folder.with_suffix(".pt"), **plan)
    assert set(codes) == {0}, output_of(folder)
    check_same(uninterrupted, folder)
    assert names(folder.glob("checkpoint-*")) == names(uninterrupted.glob("checkpoint-*"))
    assert not (folder / UNFINISHED_FOLDER).exists()


def names(paths):
    return sorted(path.name for path in paths)


@pytest.mark.parametrize(
    ("settings", "kill"),
    [
        ("plain", ("score", 6)),  # the checkpoint of step 4 lies between two logs
        ("tree", ("score", 15)),  # from the end of an epoch; the numbers count the evaluations' calls too
        ("chain", ("score", 14)),
        ("lora", ("score", 4)),
        ("workflow", ("score", 11)),
        ("ahead", ("score", 12)),
    ],
)
def test_a_killed_run_resumes_exactly(run, whole, tmp_path, settings, kill):
    uninterrupted = whole(settings)
    folder = tmp_path / "killed"
    assert run(folder, settings, kill=kill) == [KILLED], output_of(folder)
    assert get_last_checkpoint(folder) is not None
    resume_and_compare(run, uninterrupted, folder, settings)
    if settings == "tree":
        pandas.testing.assert_frame_equal(read_trace(uninterrupted / "trace"), read_trace(folder / "trace"))


@pytest.mark.parametrize(
    ("settings", "time", "step"),
    # At the end of an epoch, in an evaluation, while the next step is sampled
    [("tree", 6, 3), ("chain", 9, 4), ("ahead", 6, 2)],
)
def test_a_run_that_is_asked_to_end_ends_its_step_and_resumes_exactly(run, whole, tmp_path, settings, time, step):
    folder = tmp_path / "ended"
    assert run(folder, settings, kill=("score", time), number=signal.SIGTERM) == [128 + signal.SIGTERM]
    last = Path(get_last_checkpoint(folder))
    line = f"run: ended by SIGTERM after step {step} of 8, which is saved. Go on with: the same command "
    assert f"{line}--resume_from_checkpoint {last}\n" in output_of(folder) and last.name == f"checkpoint-{step}"
    assert "Traceback" not in output_of(folder)
    uninterrupted = whole(settings)
    assert set(run(folder, settings, resume=True, result=folder.with_suffix(".pt"))) == {0}
    check_same(uninterrupted, folder)


def test_two_processes_of_which_one_is_asked_to_end(run, whole, tmp_path):
    folder = tmp_path / "ended"
    plan = {"kill": ("score", 3), "killed_rank": 1, "number": signal.SIGINT, "processes": 2}
    codes = run(folder, "two_processes", **plan)
    assert set(codes) <= {128 + signal.SIGINT, KILLED} and codes != [KILLED, KILLED], output_of(folder)
    assert output_of(folder).count("run: ended by Ctrl-C after step 3 of 5, which is saved") == 1
    verify_checkpoint(folder / "checkpoint-3")
    resume_and_compare(run, whole("two_processes", processes=2), folder, "two_processes", processes=2)


def test_two_processes_that_sample_ahead(run, whole, tmp_path):
    """An epoch is one step."""
    folder = tmp_path / "ended"
    plan = {"processes": 2, "max_steps": 5}
    run(folder, "ahead", kill=("score", 6), killed_rank=1, number=signal.SIGTERM, **plan)
    assert output_of(folder).count("run: ended by SIGTERM after step 2 of 5, which is saved") == 1
    resume_and_compare(run, whole("ahead", **plan), folder, "ahead", **plan)


def test_incomplete_folders_never_count_as_checkpoints(whole):
    operations, incomplete = json.loads((whole("plain") / "operations.json").read_text())
    assert incomplete == []
    assert any(line.startswith("os.rename") for line in operations) and len(operations) > 100


@pytest.mark.parametrize(
    ("operation", "path", "last"),
    [
        ("open", "_unfinished/checkpoint-4/team_trainer_state.json", "checkpoint-2"),
        ("os.rename", "plain/checkpoint-2", "checkpoint-4"),
        ("os.remove", "optimizer.pt", "checkpoint-4"),
    ],
)
def test_resume_after_a_kill_during_a_save(run, whole, tmp_path, operation, path, last):
    uninterrupted = whole("plain")
    operations, _ = json.loads((uninterrupted / "operations.json").read_text())
    number = 1 + next(k for k, line in enumerate(operations) if line.startswith(operation) and line.endswith(path))
    folder = tmp_path / "killed"
    assert run(folder, "plain", kill=("write", number)) == [KILLED], output_of(folder)
    assert (folder / UNFINISHED_FOLDER).is_dir()
    assert Path(get_last_checkpoint(folder)).name == last
    read_checkpoint(folder / last)
    resume_and_compare(run, uninterrupted, folder, "plain")


NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)


@pytest.mark.parametrize(
    ("stage", "distribution"),
    [
        (None, "MULTI_CPU"),
        pytest.param(3, "DEEPSPEED", marks=NEEDS_DEEPSPEED),
    ],
)
def test_two_processes(run, whole, tmp_path, stage, distribution):
    """Each process has a part of the checkpoint; one that dies leaves the others' parts behind."""
    plan = {"processes": 2}
    if stage is not None:
        optimization = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        config = {"zero_optimization": optimization, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
        auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        plan["zero"] = tmp_path / "deepspeed.json"
        plan["zero"].write_text(json.dumps({**config, **auto}))
    uninterrupted = whole("two_processes", **plan)
    result = result_of(uninterrupted)
    assert (result["distribution"], result["processes"]) == (distribution, 2)
    folder = tmp_path / "killed"
    codes = run(folder, "two_processes", kill=("part", 2), killed_rank=1, **plan)
    assert codes[1] == KILLED and codes[0] != 0, output_of(folder)
    assert Path(get_last_checkpoint(folder)).name == "checkpoint-2"
    assert (folder / UNFINISHED_FOLDER / "checkpoint-4").is_dir()
    resume_and_compare(run, uninterrupted, folder, "two_processes", **plan)


def test_nodes_without_a_common_folder_save_whole_checkpoints(forked, tmp_path):
    done = forked.run(SCRIPT.with_name("own_folders.py"), tmp_path, processes=2)
    assert done.codes == [0, 0], done.stderr[-4000:]
    for step in (1, 2, 3):
        first, second = (verify_checkpoint(tmp_path / str(k) / f"checkpoint-{step}")["checksums"] for k in range(2))
        assert {name.replace("_0", "_1") for name in first} == {name.replace("_0", "_1") for name in second}
        weights = {name for name in first if name.endswith(".safetensors")}
        assert len(weights) == 6 and all(first[name] == second[name] for name in weights)  # of agents and critics


# Resumed in this process: what is refused, and what the trackers are told


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    tiny_trainer(folder, save_strategy="steps", beta=0.01).train()
    return folder / "checkpoint-1"


def refusal(checkpoint, tmp_path, **changes):
    trainer = tiny_trainer(tmp_path, **{"max_steps": 2, "beta": 0.01, **changes})
    before = {name: x.clone() for name, x in trainer.team.state_dict().items()}
    with pytest.raises(ValueError) as error:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert all(torch.equal(x, before[name]) for name, x in trainer.team.state_dict().items())
    return str(error.value)


def other_team(**changes):
    return AgentTeam(
        {role: tiny_llama(seed, num_hidden_layers=1, **changes) for seed, role in enumerate(("aux", "main"))},
        {role: byte_tokenizer() for role in ("aux", "main")},
    )


def keeping_team():
    team = tiny_team()
    team.reasoning["main"] = "keep"
    return team


class OtherEnvironment(FunctionEnvironment):
    pass


def functions(**changes):
    """The environment of the other tests, with other settings."""
    prompts = {role: "Task {x}, part " + role + ":" for role in ("aux", "main")}
    return FunctionEnvironment(**{"prompts": prompts, "reward_funcs": count_reward, "transition": feedback, **changes})


class OwnEnvironment(FunctionEnvironment):
    def __init__(self, level):
        super().__init__(functions().templates, count_reward)
        self.level = level

    def resume_settings(self):
        return {"level": self.level}


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"num_generations": 8}, ["num_generations: 4 in the checkpoint, 8 in this run"]),
        ({"learning_rate": 0.5, "optim": "sgd"}, ["learning_rate: 0.001 in the checkpoint, 0.5", "optim: 'adamw"]),
        ({"trainer": MARLOOTrainer, "config": MARLOOConfig}, ["trainer: 'MAGRPO' in the checkpoint, 'MARLOO'", ": "]),
        ({"team": tiny_team(("a", "b"))}, ["roles: ['aux', 'main'] in the checkpoint, ['a', 'b']"]),
        (
            {"team": other_team(hidden_size=16)},
            ["agent aux: 'llama, 18592 parameters, 18592 trained'", "agent main: ", "not trained"],
        ),
        ({"team": other_team(initializer_range=0.2)}, ["weights that are not trained: "]),  # another reference policy
        ({"team": keeping_team()}, ["reasoning: {'aux': 'auto', 'main': 'auto'}"]),
        ({"train_dataset": tiny_items(12).map(lambda row: {"x": row["x"] + "!"})}, ["train_dataset: '12 items"]),
        ({"environment": OtherEnvironment({"aux": "a", "main": "b"}, count_reward)}, ["Function", "OtherEnvironment"]),
        (
            {"environment": functions(prompts={"aux": "{x}", "main": lambda item: "What?"})},
            ["environment prompts: {'aux': 'Task {x}, part aux:'", "{'aux': '{x}', 'main': '<lambda>'}"],
        ),
        ({"environment": functions(reward_weights=[2.0])}, ["environment reward_weights: [1.0] in the checkpoint"]),
        ({"frozen_agents": ["aux"], "resume_changes": "allow"}, ["frozen_agents: None in the checkpoint, ['aux']"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_run_is_refused(checkpoint, tmp_path, changes, differences):
    message = refusal(checkpoint, tmp_path, **changes)
    assert str(checkpoint) in message and "AgentTeam.from_pretrained" in message
    assert ("`resume_changes: allow`" in message) == (not {"learning_rate", "frozen_agents"} & changes.keys())
    assert all(difference in message for difference in differences), message
    assert "\n" not in message
    if not {"trainer", "team"} & changes.keys():
        assert message.count(" in the checkpoint, ") <= max(len(differences), 2)


def test_settings_of_a_custom_environment_are_compared(tmp_path):
    tiny_trainer(tmp_path / "saved", environment=OwnEnvironment(1), save_strategy="steps").train()
    message = refusal(tmp_path / "saved" / "checkpoint-1", tmp_path, environment=OwnEnvironment(2), beta=0.0)
    assert "environment level: 1 in the checkpoint, 2 in this run" in message


def test_a_run_that_has_taken_all_steps_only_repeats_its_end(checkpoint, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("trl_multiagent.trainers.base.checkpoints.logger.warning", said.append)
    trainer = tiny_trainer(tmp_path, beta=0.01, max_steps=1)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 1
    assert said == [f"{checkpoint} has taken 1 of 1 steps: none is left."]
    saved = AgentTeam.from_pretrained(str(checkpoint)).state_dict()
    assert all(torch.equal(x, saved[name]) for name, x in trainer.team.state_dict().items())


def test_other_settings_may_change(checkpoint, tmp_path):
    """Length of the run, memory, logging, saving and evaluation. The resumed run uses its own values."""
    settings = {"max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 2, "gradient_checkpointing": True}
    settings |= {**SAVED, "save_steps": 3, **EVALUATED, "eval_steps": 2, "eval_dataset": tiny_items(2)}
    trainer = tiny_trainer(tmp_path, beta=0.01, **settings)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert [e["step"] for e in trainer.state.log_history if "loss" in e] == [1, 2, 4]
    assert [e["step"] for e in trainer.state.log_history if "eval_reward" in e] == [2, 4]
    assert names(tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


# Damage


def rename_key(path, key):
    path.write_text(path.read_text().replace(f'"{key}":', f'"{key}s":'))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "optimizer.pt").unlink(), ["is damaged: missing", "optimizer.pt"]),
        (lambda folder: (folder / STATE_FILE).unlink(), ["not a complete checkpoint", STATE_FILE]),
        (lambda folder: (folder / STATE_FILE).write_text('{"format_'), ["is damaged", STATE_FILE]),
        *(
            (lambda folder, key=key: rename_key(folder / STATE_FILE, key), ["is damaged", STATE_FILE])
            for key in ("settings", "checksums", "weights_only")
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused(checkpoint, tmp_path, damage, words):
    copy = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    damage(copy)
    message = refusal(copy, tmp_path / "run")
    assert all(word in message for word in words) and "\n" not in message, message


def test_a_flipped_bit_in_any_file_is_found(checkpoint, tmp_path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    files = [name for name in read_checkpoint(copy)["checksums"] if (copy / name).stat().st_size]
    assert {"optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth", "team_process_0.json"} <= {*files}
    assert {"team.json", "agents/main/model.safetensors", "agents/aux/tokenizer.json"} <= {*files}
    for name in files:
        for position in (0.0, 0.5):
            flip(copy / name, position)
            with pytest.raises(ValueError, match=rf"is damaged: .* changed since it was saved: {name}\."):
                verify_checkpoint(copy)
            flip(copy / name, position)
    (copy / "notes.txt").write_text("The good one.")  # files of the user are ignored
    verify_checkpoint(copy)
    (copy / "agents/aux/adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"changed since it was saved: agents/aux/adapter_config\.json\."):
        verify_checkpoint(copy)
    (copy / "agents/aux/adapter_config.json").unlink()
    flip(copy / "optimizer.pt")
    assert "changed since it was saved: optimizer.pt" in refusal(copy, tmp_path / "run")


def test_a_damaged_newest_checkpoint_is_not_skipped(tmp_path):
    tiny_trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=2).train()
    flip(tmp_path / "checkpoint-3" / "agents" / "main" / "model.safetensors")
    with pytest.raises(ValueError, match=r"checkpoint-3 is damaged: .*: agents/main/model.safetensors"):
        tiny_trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_weights_only_is_refused(tmp_path):
    tiny_trainer(tmp_path, save_strategy="steps", save_only_model=True).train()
    assert "save_only_model" in refusal(tmp_path / "checkpoint-1", tmp_path / "run", beta=0.0)


def test_resuming_without_a_checkpoint_is_an_error(tmp_path):
    (tmp_path / UNFINISHED_FOLDER / "checkpoint-7").mkdir(parents=True)
    with pytest.raises(ValueError, match="There is no checkpoint in"):
        tiny_trainer(tmp_path).train(resume_from_checkpoint=True)
    tiny_trainer(tmp_path).train()
    assert not (tmp_path / UNFINISHED_FOLDER).exists()


def test_the_first_steps_are_removed_and_not_the_oldest_files(tmp_path):
    for time, step in enumerate([100, 9, 20]):  # a folder that was copied has other times
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (time, time))
    rotate(tmp_path, 2, [])
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-20", "checkpoint-100"}


def test_the_best_checkpoint_is_named_and_kept(tmp_path, capsys):
    rewards = iter([3.0, 2.0, None])  # the last ones are dropped
    environment = tiny_environment(reward=lambda completions, **columns: [reward[0]] * len(completions))
    reward = [0.0]

    class Evaluated(MAGRPOTrainer):
        def evaluate(self, *args, **kwargs):
            reward[0] = next(rewards)
            return super().evaluate(*args, **kwargs)

    settings = {"max_steps": 3, **SAVED, "save_total_limit": 1, **EVALUATED, "eval_dataset": tiny_items(1)}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "reward", "reward_none": "drop"}
    trainer = tiny_trainer(tmp_path, environment=environment, trainer=Evaluated, **settings)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert names(tmp_path.glob("checkpoint-*")) == ["checkpoint-1"]  # all that the limit allows
    assert f"Best checkpoint  {tmp_path / 'checkpoint-1'}\n" in capsys.readouterr().out


def test_the_best_checkpoint_of_a_run_that_goes_on(tmp_path):
    """It is found in a folder that was moved, and is forgotten if another metric chooses."""
    settings = {**SAVED, **EVALUATED, "eval_dataset": tiny_items(1), "load_best_model_at_end": True}
    counted = {"metric_for_best_model": "num_tokens", "greater_is_better": False}
    trainer = tiny_trainer(tmp_path / "run", max_steps=2, **settings, **counted)
    trainer.train()
    assert trainer.state.best_global_step == 1
    (tmp_path / "run").rename(tmp_path / "moved")
    trainer = tiny_trainer(tmp_path / "moved", max_steps=2, **settings, **counted)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "moved" / "checkpoint-1")
    trainer.save_model()
    assert same_teams(tmp_path / "moved", tmp_path / "moved" / "checkpoint-1")
    trainer = tiny_trainer(tmp_path / "moved", max_steps=3, metric_for_best_model="reward", **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_global_step == 3


def test_what_an_interrupted_step_has_counted_is_not_logged(tmp_path):
    def losses(trainer):
        return [entry["agents/aux/loss"] for entry in trainer.state.log_history if "agents/aux/loss" in entry]

    settings = {"max_steps": 2, "advantage_mode": "raw", "reward_shift": 1.0, "num_generations": 2, **SAVED}
    whole, trainer = (tiny_trainer(tmp_path / name, **settings) for name in ("whole", "interrupted"))
    whole.train()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        loss = trainer.agent_loss

        def interrupted(role, *args):
            if (trainer.state.global_step, role) == (1, "main"):
                raise KeyboardInterrupt
            return loss(role, *args)

        patch.setattr(trainer, "agent_loss", interrupted)
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == losses(whole) and len(losses(whole)) == 2


@pytest.mark.parametrize("metric", ["reward", "grade"])
def test_what_an_evaluation_could_not_measure_is_never_the_best(tmp_path, metric):
    rewards = iter([None, 1.0, None, 2.0])  # the first evaluation is at the start

    def reward(completions, log_metric, **columns):
        if not trainer.model.training:
            log_metric("grade", math.nan if value[0] is None else value[0])
        return [value[0] if metric == "reward" or trainer.model.training else 0.0] * len(completions)

    class Evaluated(MAGRPOTrainer):
        def evaluate(self, *args, **kwargs):
            value[0] = next(rewards)
            metrics = super().evaluate(*args, **kwargs)
            value[0] = 0.0
            return metrics

    value = [0.0]
    settings = {"max_steps": 3, **SAVED, **EVALUATED, "eval_dataset": tiny_items(1), "eval_on_start": True}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": metric, "reward_none": "drop"}
    settings |= {"lr_scheduler_type": "reduce_lr_on_plateau", "greater_is_better": True}
    trainer = tiny_trainer(tmp_path, environment=tiny_environment(reward=reward), trainer=Evaluated, **settings)
    trainer.train()
    assert trainer.state.best_metric == 2.0 and trainer.state.best_global_step == 3
    assert trainer.lr_scheduler.last_epoch == 2  # a step for each that measured something

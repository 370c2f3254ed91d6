"""A run that is killed and resumed is the run that was not killed; a checkpoint of another run is refused."""

import importlib.util
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from trl_multiagent import AgentTeam, FunctionEnvironment, MAGRPOTrainer, MARLOOConfig, MARLOOTrainer
from trl_multiagent.trainers.checkpoint_files import STATE_FILE, UNFINISHED_FOLDER, read_checkpoint

from tiny import (
    byte_tokenizer,
    count_reward,
    feedback,
    team_of,
    tiny_environment,
    tiny_items,
    tiny_llama,
    tiny_team,
    tiny_trainer,
)


SCRIPT = Path(__file__).with_name("killed_runs.py")
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
    """Runs that nothing interrupts, by their settings."""
    finished = {}

    def whole(settings, **plan):
        key = (settings, *map(str, plan.values()))
        if key not in finished:
            folder = tmp_path_factory.mktemp("whole") / settings
            codes = run(folder, settings, result=folder.with_suffix(".pt"), kill=("write", 0), **plan)
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
        ("plain", ("end", 0)),  # nothing is left to train
        ("tree", ("score", 15)),  # from the end of an epoch; the numbers count the evaluations' calls too
        ("chain", ("score", 14)),
        ("lora", ("score", 4)),
    ],
)
def test_a_killed_run_resumes_as_if_nothing_had_happened(run, whole, tmp_path, settings, kill):
    uninterrupted = whole(settings)
    folder = tmp_path / "killed"
    assert run(folder, settings, kill=kill) == [KILLED], output_of(folder)
    assert get_last_checkpoint(folder) is not None
    resume_and_compare(run, uninterrupted, folder, settings)
    tables = [sorted(path.glob("completions/*.parquet")) for path in (uninterrupted, folder)]
    assert len(tables[0]) == (4 if settings == "tree" else 0)
    for left, right in zip(*tables, strict=True):
        pandas.testing.assert_frame_equal(pandas.read_parquet(left), pandas.read_parquet(right))


def test_at_no_instant_an_incomplete_folder_counts_as_a_checkpoint(whole):
    operations, incomplete = json.loads((whole("plain") / "operations.json").read_text())
    assert incomplete == []
    assert any(line.startswith("os.rename") for line in operations) and len(operations) > 100


@pytest.mark.parametrize(
    ("operation", "path", "last"),
    [
        ("os.mkdir", "_unfinished/checkpoint-4/agents/main", "checkpoint-2"),
        ("torch.save", "_unfinished/checkpoint-4/optimizer.pt", "checkpoint-2"),
        ("open", "_unfinished/checkpoint-4/team_trainer_state.json", "checkpoint-2"),
        ("os.rename", "_unfinished/checkpoint-4", "checkpoint-2"),
        ("os.rename", "plain/checkpoint-2", "checkpoint-4"),
        ("os.remove", "optimizer.pt", "checkpoint-4"),
    ],
)
def test_killed_during_the_save(run, whole, tmp_path, operation, path, last):
    uninterrupted = whole("plain")
    operations, _ = json.loads((uninterrupted / "operations.json").read_text())
    number = 1 + next(k for k, line in enumerate(operations) if line.startswith(operation) and line.endswith(path))
    folder = tmp_path / "killed"
    assert run(folder, "plain", kill=("write", number)) == [KILLED], output_of(folder)
    assert (folder / UNFINISHED_FOLDER).is_dir()
    assert Path(get_last_checkpoint(folder)).name == last
    read_checkpoint(folder / last)
    resume_and_compare(run, uninterrupted, folder, "plain")


def no_deepspeed() -> str:
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    return "" if shutil.which("g++") else "ZeRO on CPU needs a C++ compiler, and there is no g++"


@pytest.mark.parametrize(
    ("stage", "distribution"),
    [
        (None, "MULTI_CPU"),
        pytest.param(2, "DEEPSPEED", marks=pytest.mark.skipif(bool(no_deepspeed()), reason=no_deepspeed())),
        pytest.param(3, "DEEPSPEED", marks=pytest.mark.skipif(bool(no_deepspeed()), reason=no_deepspeed())),
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
    uninterrupted = tmp_path / "whole"
    assert run(uninterrupted, "two_processes", result=tmp_path / "whole.pt", **plan) == [0, 0], output_of(
        uninterrupted
    )
    result = result_of(uninterrupted)
    assert (result["distribution"], result["processes"]) == (distribution, 2)
    folder = tmp_path / "killed"
    codes = run(folder, "two_processes", kill=("part", 2), killed_rank=1, **plan)
    assert codes[1] == KILLED and codes[0] != 0, output_of(folder)
    assert Path(get_last_checkpoint(folder)).name == "checkpoint-2"
    assert (folder / UNFINISHED_FOLDER / "checkpoint-4").is_dir()
    resume_and_compare(run, uninterrupted, folder, "two_processes", **plan)


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
        {role: tiny_llama(seed, **changes) for seed, role in enumerate(("aux", "main"))},
        {role: byte_tokenizer() for role in ("aux", "main")},
    )


def longest_word(completions, **columns):
    return [float(max(map(len, completion.values()))) for completion in completions]


class OtherEnvironment(FunctionEnvironment):
    pass


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"num_generations": 8}, ["num_generations is 4 in it and 8 here"]),
        ({"joint_mode": "cross", "seed": 7}, ["joint_mode is 'align' in it and 'cross' here", "seed is 42 in"]),
        ({"num_turns": 2}, ["num_turns is 1 in it and 2", "turn_gradient_weights is [1.0] in"]),
        ({"items_per_device": 3}, ["items_per_device is 2 in it and 3"]),
        ({"learning_rate": 0.5, "optim": "sgd"}, ["learning_rate is 0.001 in it and 0.5", "optim is 'adamw"]),
        ({"trainer": MARLOOTrainer, "config": MARLOOConfig}, ["trainer is 'MAGRPO' in it and 'MARLOO' here"]),
        ({"team": tiny_team(("a", "b"))}, ["roles is ['aux', 'main'] in it and ['a', 'b']"]),
        ({"team": tiny_team(("aux", "main", "third"))}, ["roles is "]),
        (
            {"team": other_team(hidden_size=16)},
            ["agent aux is 'llama, 28896 parameters, 28896 trained'", "agent main is ", "not trained"],
        ),
        (
            {"team": other_team(initializer_range=0.2)},
            ["weights that are not trained is "],
        ),  # another reference policy
        ({"team": team_of("lora")}, ["agent main is ", "weights that are not trained is "]),
        ({"train_dataset": tiny_items(11)}, ["training data is '12 items with x", "'11 items with x"]),
        (
            {"train_dataset": tiny_items(12).map(lambda row: {"x": row["x"] + "!"})},
            ["training data is '12 items with x"],
        ),
        (
            {"environment": tiny_environment(reward=longest_word)},
            ["environment reward_funcs is ['count_reward'] in it and ['longest_word'] here"],
        ),
        (
            {
                "environment": FunctionEnvironment(
                    {"aux": "Say {x}.", "main": "Say {x}."}, count_reward, transition=feedback
                )
            },
            ["environment prompts is", "first prompts is"],
        ),
        ({"environment": OtherEnvironment({"aux": "", "main": ""}, [])}, ["FunctionEnvironment", "OtherEnvironment"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_run(checkpoint, tmp_path, changes, differences):
    message = refusal(checkpoint, tmp_path, **changes)
    assert str(checkpoint) in message and "AgentTeam.from_pretrained" in message
    assert all(difference in message for difference in differences), message
    assert "\n" not in message
    if not {"trainer", "team", "environment", "train_dataset"} & changes.keys():
        assert message.count(" in it and ") == len(differences)


def test_what_may_differ(checkpoint, tmp_path):
    """Length of the run, memory, logging, saving and evaluation; the run's own arguments count for all of them."""
    trainer = tiny_trainer(
        tmp_path,
        beta=0.01,
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=2,
        save_strategy="steps",
        save_steps=3,
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=tiny_items(2),
        gradient_checkpointing=True,
    )
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert [e["step"] for e in trainer.state.log_history if "loss" in e] == [1, 2, 4]
    assert [e["step"] for e in trainer.state.log_history if "eval_reward" in e] == [2, 4]
    assert names(tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


def test_changes_that_are_allowed_are_recorded(checkpoint, tmp_path, caplog):
    resume = {"max_steps": 2, "beta": 0.01, "save_strategy": "steps", "resume_changes": "allow"}
    trainer = tiny_trainer(tmp_path, **resume, num_generations=2, train_dataset=tiny_items(11))
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 2
    changes = json.loads((tmp_path / "resume_changes.json").read_text())
    assert {"step": 1, "setting": "num_generations", "before": 4, "now": 2} in changes
    names_of_changes = [change["setting"] for change in changes]
    assert sorted(names_of_changes) == ["num_generations", "training data"]
    again = tiny_trainer(tmp_path, **{**resume, "max_steps": 3}, num_generations=3, train_dataset=tiny_items(11))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    recorded = read_checkpoint(tmp_path / "checkpoint-3")["changes"]
    assert [change["setting"] for change in recorded] == [*names_of_changes, "num_generations"]


@pytest.mark.parametrize("changes", [{"learning_rate": 0.5}, {"team": tiny_team(("a", "b"))}, {"optim": "sgd"}])
def test_what_the_checkpoint_holds_cannot_change(checkpoint, tmp_path, changes):
    message = refusal(checkpoint, tmp_path, resume_changes="allow", num_generations=2, **changes)
    assert "is a checkpoint with settings that cannot change: " in message and "num_generations" not in message


def test_a_checkpoint_that_is_further_than_the_run(tmp_path, caplog):
    tiny_trainer(tmp_path, max_steps=3, save_strategy="steps").train()
    with pytest.raises(ValueError, match=r"is of step 3, and the run has only 2 steps: raise `max_steps`"):
        tiny_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    trainer = tiny_trainer(tmp_path, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


def flip_a_bit(path, position):
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 4
    path.write_bytes(content)


def test_a_flipped_bit_in_any_file_is_found(checkpoint, tmp_path):
    files = [path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file()]
    assert len(files) > 8
    copy = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    read_checkpoint(copy, verify=True)
    for number, name in enumerate(files):
        shutil.copytree(checkpoint, copy, dirs_exist_ok=True)
        flip_a_bit(copy / name, 1000 * number + 7)
        with pytest.raises(ValueError, match=name.name):
            read_checkpoint(copy, verify=True)


def test_a_damaged_checkpoint_names_the_last_whole_one(tmp_path):
    tiny_trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=1).train()
    flip_a_bit(tmp_path / "checkpoint-3" / "optimizer.pt", 5000)
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(ValueError) as error:
        tiny_trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=True)
    message = str(error.value)
    assert "checkpoint-3 is damaged: not as they were saved: optimizer.pt" in message
    assert message.endswith(f"or resume from {tmp_path / 'checkpoint-1'}.") and "\n" not in message


def test_a_checkpoint_without_checksums_can_be_resumed(checkpoint, tmp_path, caplog):
    copy = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint-1"))
    state = json.loads((copy / STATE_FILE).read_text())
    for name in ("checksums", "checksum", "changes"):
        del state[name]
    state["settings"] |= {"train_dataset": "12 items with x, digest 0123456789ab"}
    for name in ("training data", "first prompts", "environment prompts"):
        del state["settings"][name]
    (copy / STATE_FILE).write_text(json.dumps(state))
    trainer = tiny_trainer(tmp_path / "run", max_steps=2, beta=0.01)
    trainer.train(resume_from_checkpoint=str(copy))
    assert trainer.state.global_step == 2


def damaged(checkpoint, tmp_path, damage):
    copy = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    damage(copy)
    return refusal(copy, tmp_path / "run")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "optimizer.pt").unlink(), ["is not complete", "optimizer.pt"]),
        (lambda folder: (folder / "agents/aux/model.safetensors").write_bytes(b"0" * 99), ["agents/aux/model.safete"]),
        (lambda folder: (folder / STATE_FILE).unlink(), ["no complete checkpoint", STATE_FILE]),
        (lambda folder: (folder / STATE_FILE).write_text('{"format_'), ["is damaged", STATE_FILE]),
        (
            lambda folder: (folder / STATE_FILE).write_text('{"format_version": 99}'),
            ["format version 99", "version 1"],
        ),
        (lambda folder: (folder / STATE_FILE).write_text("[]"), ["format version None"]),
    ],
)
def test_a_damaged_checkpoint(checkpoint, tmp_path, damage, words):
    message = damaged(checkpoint, tmp_path, damage)
    assert all(word in message for word in words), message


def test_a_checkpoint_of_weights_only(tmp_path):
    tiny_trainer(tmp_path, save_strategy="steps", save_only_model=True).train()
    assert "save_only_model" in refusal(tmp_path / "checkpoint-1", tmp_path / "run", beta=0.0)


def test_no_checkpoint(tmp_path):
    (tmp_path / UNFINISHED_FOLDER / "checkpoint-7").mkdir(parents=True)
    with pytest.raises(ValueError, match="There is no checkpoint in"):
        tiny_trainer(tmp_path).train(resume_from_checkpoint=True)
    tiny_trainer(tmp_path).train()
    assert not (tmp_path / UNFINISHED_FOLDER).exists()


def test_the_same_wandb_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    monkeypatch.delenv("WANDB_RESUME", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(id="7up")))
    trainer = tiny_trainer(tmp_path)
    assert trainer._tracking()["wandb_run_id"] is None
    trainer.args.report_to = ["wandb"]
    saved = json.loads(json.dumps({"global_step": 3, "tracking": trainer._tracking()}))
    tiny_trainer(tmp_path)._continue_tracking(saved)
    assert "WANDB_RUN_ID" not in os.environ  # that run does not report there
    trainer._continue_tracking(saved)
    assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("7up", "allow")
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    trainer._continue_tracking(saved)
    assert os.environ["WANDB_RUN_ID"] == "mine"


def test_the_same_tensorboard_folder_goes_on(tmp_path, monkeypatch):
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    tiny_trainer(tmp_path, save_strategy="steps", report_to="tensorboard").train()
    (folder,) = (tmp_path / "runs").iterdir()
    (first,) = folder.iterdir()
    first = first.rename(folder / "events.first")  # the writers name their files by the second
    monkeypatch.setattr("transformers.integrations.integration_utils.default_logdir", lambda: "runs/another")
    tiny_trainer(tmp_path, max_steps=2, report_to="tensorboard").train(resume_from_checkpoint=True)
    assert list((tmp_path / "runs").iterdir()) == [folder]
    (second,) = set(folder.iterdir()) - {first}
    assert b"agents/main/loss" in first.read_bytes() and b"agents/main/loss" in second.read_bytes()


def test_the_best_checkpoint_is_named_and_kept(tmp_path):
    rewards = iter([3.0, 2.0, 1.0])
    environment = tiny_environment(reward=lambda completions, **columns: [reward[0]] * len(completions))
    reward = [0.0]

    class Evaluated(MAGRPOTrainer):
        def evaluate(self, *args, **kwargs):
            reward[0] = next(rewards)
            return super().evaluate(*args, **kwargs)

    trainer = tiny_trainer(
        tmp_path,
        environment=environment,
        trainer=Evaluated,
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=tiny_items(1),
        load_best_model_at_end=True,
        metric_for_best_model="reward",
    )
    kept = []
    save = trainer._save_checkpoint

    def saving(*args):
        save(*args)
        state = json.loads((tmp_path / f"checkpoint-{trainer.state.global_step}" / "trainer_state.json").read_text())
        kept.append((names(tmp_path.glob("checkpoint-*")), state["best_model_checkpoint"]))

    trainer._save_checkpoint = saving
    trainer.train()
    best = str(tmp_path / "checkpoint-1")
    assert kept == [
        (["checkpoint-1"], best),
        (["checkpoint-1", "checkpoint-2"], best),
        (["checkpoint-1", "checkpoint-3"], best),
    ]
    assert names(tmp_path.glob("checkpoint-*")) == ["checkpoint-1"]  # all that the limit allows at the end

"""`train_marlhf.py` and `train_reward_model.py`: settings, plans, the three phases and how they resume."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForSequenceClassification

from trl_multiagent import FunctionEnvironment, JointRewardTrainer, Task
from trl_multiagent.recipe import marlhf
from trl_multiagent.recipe.marlhf import make_phases, run_marlhf
from trl_multiagent.recipe.reward_model import run_reward_model
from trl_multiagent.recipe.run import read_settings

from tiny import count_reward, tiny_items


RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "code_generation"
TASK = Task(
    lambda settings: FunctionEnvironment({"aux": "Help with {x}:", "main": "Do {x}:"}, count_reward),
    lambda settings: (tiny_items(6), tiny_items(2)),
)
SMALL = "--preference_num_candidates 4 --preference_num_items 4 --max_completion_length 6 --items_per_device 2 "
SMALL += "--reward_train_batch_size 4 --reward_learning_rate 1e-3 --max_steps 2 --logging_steps 1 --disable_tqdm "
SMALL += "--reward_eval_fraction 0.3 --dataset_test_split x"


@pytest.fixture(autouse=True)
def no_run_id(monkeypatch):
    monkeypatch.delenv("RUN_ID", raising=False)
    monkeypatch.delenv("JOB_ID", raising=False)


def phases(*argv):
    settings, _ = read_settings("marlhf", TASK, ["--model_name", "m", *argv], "marlhf")
    return make_phases(settings)


def script(name, *argv):
    spec = importlib.util.spec_from_file_location("script", RECIPES / f"train_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(argv)


def log_history(folder):
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


# Settings


@pytest.mark.parametrize("config", ["marlhf_demo", "marlhf_he", "marlhf_che", "reward_model_demo"])
def test_configurations_have_a_plan(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script("marlhf" if "marlhf" in config else "reward_model", "--config", config, "--dry_run")
    out = capsys.readouterr().out
    assert "Dry run" in out and "starts from" in out
    assert ("Phase 3 of 3: magrpo" in out) == ("marlhf" in config)
    assert list(tmp_path.iterdir()) == []


def test_keys_of_the_peer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    section = {"num_train_epochs": 16, "agent_learning_rate": 2.0e-5, "num_turns": 1, "preference_num_candidates": 80}
    section |= {"preference_pairs_per_sample": 16, "pair_selection": "reward_gap", "use_environment_step": True}
    section |= {"environment_steps_per_pair": 2, "collaboration_mode": "decentralized", "max_new_tokens": 256}
    section |= {"joint_mode": "aligned", "rollout_buffer_size": 4, "train_batch_size": 4, "eval_interval": 4}
    section |= {"eval_num_samples": 4, "eval_batch_size": 1, "logging_steps": 50, "early_termination_threshold": None}
    section |= {"reference_kl_enabled": False, "reference_kl_coef": 0.1, "parallel_training": "none"}
    section |= {"agent_devices": ["cuda:0"], "discount": 0.9, "advantage_normalization": True, "num_agents": 2}
    section |= {"dpo_beta": 0.1, "rl_algorithm": "magrpo", "num_generations": 4, "reward_model_name": None}
    section |= {"reward_model_device": "cuda:0", "reward_learning_rate": "1e-5", "reward_num_train_epochs": 1}
    section |= {"reward_train_batch_size": 4, "reward_max_length": 2048, "reward_freeze_backbone": False}
    section |= {"critic_model_name": None, "critic_learning_rate": None, "critic_devices": None}
    section |= {"use_separate_critic": True, "critic_type": "v", "value_loss_coef": 0.6, "value_clip_range": 0.2}
    section |= {"critic_value_head_hidden_dim": None, "value_head_hidden_dim": None}
    sampling = {"name": "Qwen/Qwen2.5-Coder-3B", "temperature": 0.6, "top_p": 0.6, "top_k": None, "type": "qwen"}
    sections = {"agent_model": sampling, "marlhf": section, "reward_processor": {"enabled": True, "shift": -4.0}}
    sections |= {
        "dataset": {"name": "openai/openai_humaneval", "train_split": "test[33:163]", "eval_split": "test[:32]"}
    }
    path = tmp_path / "peer.yaml"
    path.write_text(yaml.safe_dump(sections))
    script("marlhf", "--config", str(path), "--dry_run")
    out = capsys.readouterr().out
    assert "80 per item, each of 2 completions" in out and "1 epochs, 4 pairs per device" in out
    assert "Phase 3 of 3: magrpo" in out and "4 completions per agent and node" in out


def test_rewards_of_the_model_are_not_processed_unless_the_section_says_so():
    shift = ("--override", "reward_processor.shift=-4", "reward_processor.scale_factor=2")
    run = phases(*shift)
    assert (run.collection.reward_scale, run.collection.reward_shift) == (2, -4)
    assert (run.recipe.training_args.reward_scale, run.recipe.training_args.reward_shift) == (1, 0)
    args = phases(*shift, "--process_model_reward").recipe.training_args
    assert (args.reward_scale, args.reward_shift) == (2, -4)


@pytest.mark.parametrize(
    ("algorithm", "mode"), [("magrpo", "mean"), ("marloo", "rloo"), ("maremax", "max"), ("mareinforce", "raw")]
)
def test_algorithms_of_the_last_phase(algorithm, mode):
    args = phases("--rl_algorithm", algorithm).recipe.training_args
    assert args.advantage_mode == mode and type(args).__name__.lower() == f"{algorithm}config"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rl_algorithm", "ppo"], "`marlhf.rl_algorithm`"),
        (["--reward_learning_rate", "0"], "`marlhf.reward_learning_rate`"),
        (["--num_turns", "2"], "`marlhf.num_turns`"),
        (["--override", "marlhf.reward_training={warmup: 3}"], "the reward model: "),
        (["--override", "marlhf.reward_peft={rank: 3}"], "`marlhf.reward_peft`: "),
        (
            ["--override", "marlhf.reward_peft={r: 3}", "marlhf.reward_freeze_backbone=true"],
            "remove `marlhf.reward_peft`",
        ),
        (["--override", "marlhf.reward_model=x"], "did you mean"),
        (["--resume_from_checkpoint", "true"], "RUN_ID or `output_dir`"),
    ],
)
def test_wrong_settings(argv, message, capsys):
    with pytest.raises(SystemExit) as exit:
        run_marlhf("marlhf", TASK, ["--model_name", "m", *argv], "marlhf")
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


# Runs


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("marlhf") / "run"
    argv = ["--model_name", tiny_model, "--output_dir", str(folder), *SMALL.split(), "--save_strategy", "steps"]
    run_marlhf("marlhf", TASK, [*argv, "--save_steps", "1"], "marlhf")
    return folder, argv


def test_the_three_phases(finished):
    folder, _ = finished
    assert json.loads((folder / "preferences" / "collection.json").read_text())["numbers"]["items"] == 4
    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward_model")
    assert model.config.joint_text["roles"] == ["aux", "main"]
    assert (folder / "reward_model" / "reliability.png").is_file() and not list(
        folder.glob("reward_model/checkpoint*")
    )
    assert (folder / "team.json").is_file() and (folder / "model_and_task_reward.png").is_file()
    logs = [log for log in log_history(folder / "checkpoint-2") if "reward" in log]
    assert all(log["reward"] == log["turn_1/rewards/model"] != log["turn_1/rewards/task"] for log in logs)
    assert yaml.safe_load((folder / "config.yaml").read_text())["marlhf"]["preference_num_items"] == 4


def test_each_phase_resumes_on_its_own(finished, tmp_path, monkeypatch, capsys):
    folder, argv = finished
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    argv = [str(run) if x == str(folder) else x for x in argv]

    class Stop(Exception):
        pass

    def stop(*args, **kwargs):
        raise Stop

    monkeypatch.setattr(JointRewardTrainer, "train", stop)  # the reward model is there
    shutil.rmtree(run / "checkpoint-2")
    (run / "team.json").unlink()
    run_marlhf("marlhf", TASK, [*argv, "--save_steps", "1"], "marlhf")  # the team goes on after step 1
    states = [log_history(where / "checkpoint-2") for where in (folder, run)]
    losses = [[(log["step"], log["loss"]) for log in logs if "loss" in log] for logs in states]
    assert losses[0] == losses[1]

    monkeypatch.setattr(marlhf, "phase_3", stop)
    with pytest.raises(SystemExit):  # another reward model in its folder
        run_marlhf("marlhf", TASK, [*argv, "--save_steps", "1", "--reward_learning_rate", "5e-4"], "marlhf")
    assert "holds another reward model: learning_rate was 0.001, is 0.0005" in capsys.readouterr().err
    shutil.rmtree(run / "reward_model")
    with pytest.raises(Stop):  # only the collection is there: the reward model is trained
        run_marlhf("marlhf", TASK, [*argv, "--save_steps", "1"], "marlhf")


def test_an_interrupted_reward_model_goes_on(finished, tmp_path, monkeypatch):
    folder, argv = finished
    run = tmp_path / "run"
    argv = [str(run) if x == str(folder) else x for x in argv] + ["--reward_num_train_epochs", "2"]
    shutil.copytree(folder / "preferences", run / "preferences")
    monkeypatch.setattr(marlhf, "phase_3", lambda *args: None)

    class Stop(Exception):
        pass

    def report(self):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(JointRewardTrainer, "report", report)
        with pytest.raises(Stop):
            run_marlhf("marlhf", TASK, argv, "marlhf")
    checkpoints = sorted((run / "reward_model").glob("checkpoint-*"))
    (checkpoints[0] / "half").mkdir()
    calls = []
    train = JointRewardTrainer.train
    monkeypatch.setattr(JointRewardTrainer, "train", lambda self, **given: calls.append(given) or train(self, **given))
    run_marlhf("marlhf", TASK, argv, "marlhf")
    assert calls == [{"resume_from_checkpoint": str(checkpoints[-1])}]
    assert (run / "reward_model" / "complete.json").is_file()


def test_a_reward_model_alone(finished, tiny_model, tmp_path, capsys):
    folder, _ = finished
    argv = ["--model_name", tiny_model, "--output_dir", str(tmp_path / "judge"), "--per_device_train_batch_size", "4"]
    with pytest.raises(SystemExit):
        run_reward_model("reward_model", TASK, argv, "judge")
    assert "`reward_model.preference_dataset` is missing" in capsys.readouterr().err
    argv += ["--preference_dataset", str(folder / "preferences"), "--num_train_epochs", "1", "--disable_tqdm"]
    run_reward_model(
        "reward_model", TASK, [*argv, "--override", "peft.r=4", "reward_model.eval_fraction=0.3"], "judge"
    )
    assert "held-out pairs in the right order" in capsys.readouterr().out
    FunctionEnvironment({"aux": "", "main": ""}, str(tmp_path / "judge"))


def test_given_preferences_and_other_algorithms(finished, tmp_path):
    folder, argv = finished
    argv = [str(tmp_path / "run") if x == str(folder) else x for x in argv]
    given = ["--preference_dataset", str(folder / "preferences"), "--rl_algorithm", "maac", "--save_strategy", "no"]
    run_marlhf(
        "marlhf",
        TASK,
        [*argv, *given, "--reward_freeze_backbone", "--override", "marlhf.score_task_reward=false"],
        "marlhf",
    )
    assert not (tmp_path / "run" / "preferences").exists() and (tmp_path / "run" / "team.json").is_file()
    assert not (tmp_path / "run" / "model_and_task_reward.png").exists()

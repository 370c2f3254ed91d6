"""
`train_marlhf.py`, `train_marlhf_iter.py` and `train_reward_model.py`: settings, plans, the phases and how they resume.
"""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml
from pairs import pairs
from scripts import run_script
from transformers import AutoModelForSequenceClassification

from trl_multiagent import FunctionEnvironment, JointRewardTrainer, MAGRPOConfig, MAGRPOTrainer
from trl_multiagent.folders import locked
from trl_multiagent.preferences import load_preferences
from trl_multiagent.runs import rounds
from trl_multiagent.runs.run import read_settings, run_recipe
from trl_multiagent.settings.read import ConfigError

from tiny import same_teams, tiny_environment, tiny_items, tiny_task, tiny_team


PEER_CONFIGS = Path(__file__).with_name("peer_configs")
TASK = tiny_task(6)
SMALL = "--preference_num_candidates 4 --preference_num_items 4 --max_completion_length 6 --items_per_device 2 "
SMALL += "--reward_train_batch_size 4 --reward_learning_rate 1e-3 --max_steps 2 --logging_steps 1 --disable_tqdm "
SMALL += "--reward_eval_fraction 0.3"


def phases(*argv):
    return rounds.PreferenceRun(read_settings("marlhf", TASK, ["--model_name", "m", *argv], "marlhf"))


script = partial(run_script, "code_generation")


class Stop(Exception):
    pass


def stop(*args, **kwargs):
    raise Stop


def log_history(folder):
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


# Settings


def test_the_plan_of_a_reward_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pairs(number=4).to_json("pairs.jsonl")
    script("reward_model", "--config", "reward_model_demo", "--preference_dataset", "pairs.jsonl", "--dry_run")
    assert "pairs.jsonl, 4 pairs" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]
    with pytest.raises(SystemExit):
        script("reward_model", "--config", "reward_model_demo", "--dry_run")
    assert "There are no preferences in outputs/demo_madpo/preferences." in capsys.readouterr().err


def test_files_of_the_peer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script("marlhf", "--config", str(PEER_CONFIGS / "marlhf_he_config.yaml"), "--dry_run")
    out = capsys.readouterr().out
    assert "80 per item, each of 2 completions" in out and "1 epochs, 4 pairs per device" in out
    assert "magrpo with the reward of the model" in out and "4 completions per agent and node" in out
    text = (PEER_CONFIGS / "marlhf_iter_he_config.yaml").read_text()
    for name in ("marlhf_iter", "marlhf"):  # the section of the rounds may have either name
        Path("peer.yaml").write_text(text.replace("marlhf_iter:", f"{name}:"))
        script("marlhf_iter", "--config", "peer.yaml", "--dry_run")
        out = capsys.readouterr().out
        assert "4, preference_replay_mode lambda_decay" in out
        assert "40 per item, each of 2 completions" in out and "4 at most per item, comparator_reward" in out
        assert "2 epochs, 4 pairs per device" in out and "(4 epochs of the training items)" in out


def test_rewards_of_the_model_are_not_processed_unless_the_section_says_so():
    shift = ("--override", "reward_processor.shift=-4", "reward_processor.scale_factor=2")
    run = phases(*shift)
    assert (run.preferences.reward_scale, run.preferences.reward_shift) == (2, -4)
    assert (run.prepared.training_args.reward_scale, run.prepared.training_args.reward_shift) == (1, 0)
    args = phases(*shift, "--process_model_reward").prepared.training_args
    assert (args.reward_scale, args.reward_shift) == (2, -4)


@pytest.mark.parametrize("process", [False, True])
def test_scores_of_the_model_that_make_pairs_are_not_processed_either(tmp_path, monkeypatch, process):
    argv = ["--model_name", "m", "--output_dir", str(tmp_path), "--preference_scoring_reward", "reward_model"]
    argv += ["--override", "reward_processor.scale_factor=-1", *["--process_model_reward"] * process]
    run = rounds.PreferenceRun(read_settings("marlhf_iter", TASK, argv, "marlhf"))
    run.environment, run.items, run.roles = tiny_environment(), tiny_items(2), ("aux", "main")
    monkeypatch.setattr(rounds, "with_reward_of", lambda *args, **kwargs: run.environment)
    monkeypatch.setattr(type(run.prepared), "load_team", lambda *args: tiny_team())
    found = []
    monkeypatch.setattr(rounds, "collect_preferences", lambda *args, round: found.append(args[-1].reward_scale))
    monkeypatch.setattr(rounds, "read_json", lambda path: {"numbers": {}})
    for number in (0, 1):
        rounds.sample_pairs(rounds.Round(run, number, [], {}), tmp_path)
    assert found == [-1, -1 if process else 1]


def test_the_model_that_a_reward_model_starts_from_has_the_revision_of_the_agents():
    at = ("--override", "agent_model.revision=v2")
    assert phases(*at).reward_args.model_init_kwargs == {"revision": "v2"}
    assert not phases(*at, "marlhf.reward_model_name=n").reward_args.model_init_kwargs
    own = phases(*at, "marlhf.reward_training={model_init_kwargs: {revision: v3}}")
    assert own.reward_args.model_init_kwargs == {"revision": "v3"}


def test_settings_are_those_of_the_trainer_that_is_chosen():
    run = phases("--reward_none", "drop", "--advantage_normalization", "role", "--rollouts_ahead", "1")
    assert (run.args.reward_none, run.args.advantage_normalization, run.args.rollouts_ahead) == ("drop", "role", 1)
    argv = ["--critic_learning_rate", "1e-3", "--gae_lambda", "0.5", "--advantage_mode", "rloo"]
    reason = "(`rl_algorithm` is {})"
    (note,) = [x for x in phases(*argv).prepared.notes if "no effect" in x]
    given = [f"marlhf.{name} {reason.format(repr('magrpo'))}" for name in ("critic_learning_rate", "gae_lambda")]
    assert note == f"these settings have no effect here: {', '.join(given)}."
    run = phases(*argv, "--rl_algorithm", "iac")
    (note,) = run.prepared.notes
    assert note.endswith(f"here: marlhf.advantage_mode {reason.format(repr('iac'))}.")
    assert run.args.items_per_device == 8 and run.args.critic_learning_rate == 1e-3
    with pytest.raises(ConfigError, match=r"`marlhf.critic_models` is '/no/critic', but there is no such folder"):
        phases("--rl_algorithm", "iac", "--critic_models", "/no/critic")


# Runs


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("marlhf") / "run"
    argv = ["--model_name", tiny_model, "--output_dir", str(folder), *SMALL.split(), "--save_strategy", "steps"]
    run_recipe("marlhf", TASK, [*argv, "--save_steps", "1"], "marlhf")
    return folder, argv


def test_the_three_phases(finished):
    folder, _ = finished
    assert json.loads((folder / "_preferences" / "collection.json").read_text())["numbers"]["items"] == 4
    model = AutoModelForSequenceClassification.from_pretrained(folder / "_reward_model")
    assert model.config.joint_text["roles"] == ["aux", "main"]
    assert (folder / "_reward_model" / "held_out.json").is_file()
    assert (folder / "team.json").is_file()
    logs = [log for log in log_history(folder / "checkpoint-2") if "reward" in log]
    assert all(log["reward"] == log["turn_1/rewards/model"] != log["turn_1/rewards/task"] for log in logs)
    assert yaml.safe_load((folder / "config.yaml").read_text())["marlhf"]["preference_num_items"] == 4


def test_each_phase_resumes_on_its_own(finished, tmp_path, monkeypatch, capsys):
    folder, argv = finished
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    argv = [str(run) if x == str(folder) else x for x in argv]

    monkeypatch.setattr(JointRewardTrainer, "train", stop)  # the reward model is there
    shutil.rmtree(run / "checkpoint-2")
    (run / "team.json").unlink()
    (run / "results.json").unlink()
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(MAGRPOConfig, "world_size", 2)
        run_recipe("marlhf", TASK, [*argv, "--save_steps", "1"], "marlhf")
    assert "number of processes: 1 in the checkpoint, 2 in this run" in capsys.readouterr().err
    run_recipe("marlhf", TASK, [*argv, "--save_steps", "1"], "marlhf")  # the team goes on after step 1
    states = [log_history(where / "checkpoint-2") for where in (folder, run)]
    losses = [[(log["step"], log["loss"]) for log in logs if "loss" in log] for logs in states]
    assert losses[0] == losses[1]

    run_recipe("marlhf", TASK, [*argv, "--save_steps", "1"], "marlhf")
    assert "is complete" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_recipe("marlhf", TASK, [*argv, "--save_steps", "1", "--reward_learning_rate", "5e-4"], "marlhf")
    assert "holds another run: marlhf.reward_learning_rate was 0.001, is 0.0005" in capsys.readouterr().err
    computed = phases().args.bf16
    with monkeypatch.context() as patch, pytest.raises(SystemExit):  # on the other kind of processor
        patch.setattr("trl_multiagent.trainers.base.team_config.has_bf16_products", lambda on_cpu: not computed)
        run_recipe("marlhf", TASK, [*argv, "--save_steps", "1"], "marlhf")
    assert f"holds another run: marlhf.bf16 was {computed}, is {not computed}" in capsys.readouterr().err
    (run / "results.json").unlink()
    with pytest.raises(SystemExit):  # another reward model in its folder
        run_recipe("marlhf", TASK, [*argv, "--save_steps", "1", "--reward_learning_rate", "5e-4"], "marlhf")
    assert "holds another reward model: learning_rate was 0.001, is 0.0005" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoint-2")
    with pytest.raises(SystemExit):  # a checkpoint of other settings
        run_recipe("marlhf", TASK, [*argv, "--save_steps", "1", "--learning_rate", "5e-4"], "marlhf")
    assert "is a checkpoint of another run" in capsys.readouterr().err
    shutil.rmtree(run / "_reward_model")
    with pytest.raises(Stop):  # only the collection is there: the reward model is trained
        run_recipe("marlhf", TASK, [*argv, "--save_steps", "1"], "marlhf")


def test_a_reward_model_alone(finished, tiny_model, tmp_path, capsys, monkeypatch):
    folder, _ = finished
    argv = ["--model_name", tiny_model, "--output_dir", str(tmp_path / "judge"), "--per_device_train_batch_size", "4"]
    with pytest.raises(SystemExit):
        run_recipe("reward_model", TASK, argv, "judge")
    assert "`reward_model.preference_dataset` is missing" in capsys.readouterr().err
    argv += ["--preference_dataset", str(folder / "_preferences"), "--num_train_epochs", "1", "--disable_tqdm"]
    best = "eval_strategy=epoch load_best_model_at_end=true metric_for_best_model=accuracy eval_fraction=0.3".split()
    argv += ["--override", "agent_model.use_peft=true", "agent_model.attn_implementation=eager"]
    argv += [f"reward_model.{setting}" for setting in best]
    run_recipe("reward_model", TASK, [*argv, "--dry_run"], "judge")
    assert "_preferences, " in capsys.readouterr().out and not (tmp_path / "judge").exists()
    ignored = [
        "reward_model.eval_num_samples=4",
        "reward_model.resume_from_checkpoint=auto",
        "output.save_path=elsewhere",
    ]
    run_recipe("reward_model", TASK, [*argv, *ignored, "--dry_run"], "judge")
    (note,) = capsys.readouterr().err.splitlines()
    assert "no effect here" in note and all(setting.partition("=")[0] in note for setting in ignored)
    monkeypatch.setenv("WANDB_ENTITY", "")  # restored after the test
    argv += ["wandb.entity=judges"]
    made = []
    init = JointRewardTrainer.__init__
    monkeypatch.setattr(
        JointRewardTrainer, "__init__", lambda self, *args, **kwargs: made.append(self) or init(self, *args, **kwargs)
    )
    with locked(tmp_path / "judge", ""), pytest.raises(SystemExit):
        run_recipe("reward_model", TASK, argv, "judge")
    assert f"Another program is writing to {tmp_path / 'judge'}: wait" in capsys.readouterr().err and not made
    run_recipe("reward_model", TASK, argv, "judge")
    assert "held-out pairs in the right order" in capsys.readouterr().out
    assert os.environ["WANDB_ENTITY"] == "judges"
    model = made[0].model
    assert model.config._attn_implementation == "eager"
    assert any("score" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    FunctionEnvironment({"aux": "", "main": ""}, str(tmp_path / "judge"))


def test_given_preferences_and_other_algorithms(finished, tmp_path, capsys):
    folder, argv = finished
    argv = [str(tmp_path / "run") if x == str(folder) else x for x in argv]
    given = ["--preference_dataset", str(folder / "_preferences"), "--rl_algorithm", "maac", "--save_strategy", "no"]
    given += ["--reward_freeze_backbone", "--override", "marlhf.score_task_reward=false"]
    run_recipe("marlhf", TASK, [*argv, *given], "marlhf")
    assert not (tmp_path / "run" / "_preferences").exists() and (tmp_path / "run" / "team.json").is_file()
    logs = (tmp_path / "run" / "log.jsonl").read_text()
    assert "turn_1/rewards/model" in logs and "turn_1/rewards/task" not in logs


# Rounds


def in_rounds(folder, model, *argv):
    argv = ["--model_name", model, "--output_dir", str(folder), *SMALL.split(), "--save_strategy", "steps", *argv]
    argv += "--save_steps 1 --num_iterations 2 --preference_replay_mode all --preference_num_items 3".split()
    run_recipe("marlhf_iter", TASK, argv, "marlhf_iter")


def test_rounds_and_a_kill_in_every_phase(tiny_model, tmp_path, capsys):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    argv = ["--preference_scoring_reward", "reward_model", "--comparator_policy", "history"]
    in_rounds(whole, tiny_model, *argv)
    assert "Round 2 of 2" in capsys.readouterr().out
    folders = [whole / "_rounds" / f"round_{k}" for k in range(2)]
    results = [json.loads((folder / "results.json").read_text()) for folder in folders]
    assert [result["iter"]["current_iteration"] for result in results] == [1, 2]
    assert results[1]["env_step"] == 2 * results[0]["env_step"] > 0
    logs = [log for log in results[1]["log_history"] if "reward" in log]
    assert logs and all(log["reward"] == log["turn_1/rewards/model"] for log in logs)
    # The second round's preferences are made of the first round's reward model, and not of tenths
    rewards = [load_preferences(str(folder / "preferences"), ["aux", "main"])["chosen_reward"] for folder in folders]
    assert [all(abs(10 * x - round(10 * x)) < 1e-6 for x in of_round) for of_round in rewards] == [True, False]
    teams = [whole / "_rounds" / "teams" / f"round_{k}" for k in (1, 2)]
    assert same_teams(teams[1], whole) and not same_teams(*teams)
    assert "whole/_rounds" not in (whole / "README.md").read_text()

    steps = []
    compute_loss = MAGRPOTrainer.compute_loss

    def at_step(number):
        def failing(self, *args, **kwargs):
            steps.append(self.state.global_step)
            return stop() if len(steps) == number else compute_loss(self, *args, **kwargs)

        return failing

    # In every phase of the first round, after its training, and before the end of the last one
    kills = [(JointRewardTrainer, "train", stop), (JointRewardTrainer, "report", stop)]
    kills += [(rounds, "with_reward_of", stop), (MAGRPOTrainer, "compute_loss", at_step(2))]
    kills += [(rounds, "writing_team", stop), (rounds, "save_results", stop)]
    for owner, name, replacement in kills:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
            patch.setattr(owner, name, replacement)
            in_rounds(killed, tiny_model, *argv)
    in_rounds(killed, tiny_model, *argv)
    assert same_teams(whole, killed)
    again = [json.loads((killed / "_rounds" / f"round_{k}" / "results.json").read_text()) for k in range(2)]
    for name in ("env_step", "iter", "steps"):
        assert [one[name] for one in again] == [one[name] for one in results]
    assert [one["eval"]["reward"] for one in again] == [one["eval"]["reward"] for one in results]
    in_rounds(killed, tiny_model, *argv)
    assert "is complete" in capsys.readouterr().out

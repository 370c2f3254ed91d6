"""The recipe scripts, run as users run them."""

import importlib.util
import json
import shlex
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from trl_multiagent import AgentTeam


ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes" / "code_generation"
CONFIGS = sorted((RECIPES / "configs").glob("*.yaml"))
PEER_CONFIGS = sorted((Path(__file__).parent / "peer_configs").glob("*.yaml"))
FILES = {"he": "humaneval.jsonl", "che": "coophumaneval.jsonl", "mbpp": "mbpp_sanitized.jsonl"}


@pytest.fixture(autouse=True)
def no_run_id(monkeypatch):
    monkeypatch.delenv("RUN_ID", raising=False)
    monkeypatch.delenv("JOB_ID", raising=False)


def algorithm_of(config: Path) -> str:
    sections = yaml.safe_load(config.read_text())
    return next(name for name in ("grpo", "magrpo", "marloo", "maremax", "mareinforce") if name in sections)


def run_script(algorithm: str, *argv: str) -> None:
    spec = importlib.util.spec_from_file_location("recipe_script", RECIPES / f"train_{algorithm}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(argv)


@pytest.mark.parametrize("config", [*CONFIGS, *PEER_CONFIGS], ids=lambda path: path.stem)
def test_every_configuration_has_a_plan(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_script(algorithm_of(config), "--config", str(config), "--dry_run")
    out = capsys.readouterr().out
    assert "Dry run" in out and "env steps" in out and "joint actions" in out
    assert list(tmp_path.iterdir()) == []


def test_the_published_configurations_are_there():
    names = {config.name.removesuffix("_config.yaml") for config in CONFIGS}
    expected = {"grpo_he", "grpo_che", "grpo_mbpp", "magrpo_he", "magrpo_che", "magrpo_mbpp"}
    assert expected | {"mt_magrpo_he", "mt_magrpo_che"} <= names


@pytest.mark.parametrize(
    ("config", "items"), [("mt_magrpo_he", 130), ("mt_magrpo_che", 66), ("magrpo_mbpp", 50), ("grpo_he", 130)]
)
def test_splits_select_the_published_rows_of_local_files(config, items, shared_data, capsys):
    algorithm = "grpo" if config.startswith("grpo") else "magrpo"
    data = shared_data / FILES[config.rpartition("_")[2]]
    path = RECIPES / "configs" / f"{config}_config.yaml"
    run_script(algorithm, "--config", str(path), "--dry_run", "--override", f"dataset.name={data}")
    out = capsys.readouterr().out
    assert f"{items} items of {data}" in out
    assert "evaluation       4 items" in out  # eval_num_samples
    assert "not reached" not in out


@pytest.mark.parametrize(
    ("config", "argv", "parts"),
    [
        (
            "magrpo_he",
            "--override agent_model.name=bigcode/starcoder2-3b magrpo.num_turns=1",
            ["aux: bigcode/starcoder2-3b"],
        ),
        ("magrpo_he", "--override model_name='bigcode/starcoder2-3b'", ["aux: bigcode/starcoder2-3b"]),
        ("grpo_che", "--override grpo.num_train_epochs=20 grpo.learning_rate=3e-5", ["20 epochs"]),
        (
            "mt_magrpo_che",
            "--override dataset.train_split='test[16:]' dataset.eval_split='test[:16]' magrpo.num_turns=2 "
            "magrpo.turn_gradient_weights=[1.5,0.5]",
            ["split test[16:]", "handoff random"],
        ),
        ("magrpo_he", "--model_name Qwen/Qwen2.5-Coder-7B", ["main: Qwen/Qwen2.5-Coder-7B"]),
        (
            "mt_magrpo_he",
            "--num_epochs 10 --num_turns 2 --turn_gradient_weights 1.2 0.8",
            ["10 epochs", "handoff random"],
        ),
        (
            "mt_magrpo_he",
            "--override magrpo.external_original_prompt=True magrpo.external_previous_response=True",
            ["2 turns"],
        ),
        ("mt_magrpo_che", "--override external.mode='level_feedback' external.sandbox_slice=-2", ["2 turns"]),
        ("mt_magrpo_he", "--override external.mode='plain' magrpo.handoff='best'", ["handoff best"]),
    ],
)
def test_command_lines_of_other_releases(config, argv, parts, capsys):
    algorithm = "grpo" if config.startswith("grpo") else "magrpo"
    path = RECIPES / "configs" / f"{config}_config.yaml"
    run_script(algorithm, "--config", str(path), "--dry_run", *shlex.split(argv))
    out = capsys.readouterr().out
    for part in parts:
        assert part in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["dataset.train_split=test[500:600]"], r"test\[500:600\]"),
        (["dataset.train_split=test[oops"], r"test\[oops"),
        (["dataset.train_split=test[:3]", "magrpo.items_per_device=4"], "3 items, fewer than the 4"),
    ],
)
def test_bad_splits_are_errors_of_a_dry_run(argv, message, shared_data):
    config = str(RECIPES / "configs" / "magrpo_he_config.yaml")
    data = f"dataset.name={shared_data / FILES['he']}"
    with pytest.raises(ValueError, match=message):
        run_script("magrpo", "--config", config, "--dry_run", "--override", data, *argv)


@pytest.mark.parametrize(
    ("algorithm", "config"),
    [
        ("magrpo", "mt_magrpo_che"),
        ("magrpo", "magrpo_mbpp"),
        ("grpo", "grpo_che"),
        ("marloo", "marloo_he"),
        ("maremax", "maremax_he"),
        ("mareinforce", "mareinforce_he"),
    ],
)
def test_scripts_train_a_tiny_team(algorithm, config, tiny_model, shared_data, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ID", "7")
    run_script(
        algorithm,
        "--config",
        str(RECIPES / "configs" / f"{config}_config.yaml"),
        "--override",
        f"agent_model.name={tiny_model}",
        f"dataset.name={shared_data / FILES[config.rpartition('_')[2]]}",
        f"output.base_dir={tmp_path}",
        *("--max_steps", "1", "--max_completion_length", "8", "--save_strategy", "no", "--disable_tqdm"),
        *("--eval_interval", "0"),
    )
    folder = tmp_path / ("mt_job_7" if config.startswith("mt_") else "job_7")
    merged = yaml.safe_load((folder / "config.yaml").read_text())
    assert merged["agent_model"]["name"] == tiny_model
    assert merged[algorithm]["max_steps"] == 1
    assert not (folder / "final_model").exists()


@pytest.mark.parametrize("peft", ["peft=null", "peft.r=4"])
def test_saved_and_resumed(tiny_model, shared_data, tmp_path, peft):
    arguments = [
        *("--config", str(RECIPES / "configs" / "magrpo_he_config.yaml"), "--override"),
        *(f"agent_model.name={tiny_model}", f"dataset.name={shared_data / FILES['he']}"),
        *(f"output.base_dir={tmp_path}", "output.save_final_model=true", "magrpo.eval_interval=0", peft),
        *("--max_completion_length", "8", "--save_steps", "1", "--disable_tqdm"),
    ]
    run_script("magrpo", *arguments, "--max_steps", "1")
    (folder,) = tmp_path.iterdir()
    team = AgentTeam.from_pretrained(str(folder / "final_model"))
    assert team.roles == ("aux", "main") and team.has_adapters == (peft == "peft.r=4")
    assert AutoModelForCausalLM.from_pretrained(folder / "final_model" / "agents" / "aux")

    run_script("magrpo", *arguments, "--max_steps", "2", "--resume_from_checkpoint", str(folder / "checkpoint-1"))
    assert list(tmp_path.iterdir()) == [folder]
    history = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())
    assert history["global_step"] == 2


def test_two_processes(forked, tiny_model, shared_data, tmp_path):
    arguments = [
        *("--config", RECIPES / "configs" / "mt_magrpo_he_config.yaml"),
        *("--override", f"agent_model.name={tiny_model}", f"dataset.name={shared_data / FILES['he']}"),
        *(f"output.base_dir={tmp_path}", "magrpo.max_steps=1", "magrpo.eval_interval=0"),
        *("--max_completion_length", "8", "--logging_steps", "1", "--save_steps", "1"),
    ]
    done = forked.run(RECIPES / "train_magrpo.py", *arguments, processes=2)
    assert done.codes == [0, 0], done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()  # every process writes to a checkpoint: both chose the same folder
    assert folder.name.startswith("mt_job_")
    assert (folder / "config.yaml").is_file()
    assert "'env_step': '40'" in done.stdout  # one item with 20 joint actions in each process

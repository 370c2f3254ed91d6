"""The recipes of the families beside code generation, run as users run them: each has a plan, and two train."""

from pathlib import Path

import pytest
from scripts import RECIPES, algorithm_of, run_script

from trl_multiagent.runs.run import choose_task
from trl_multiagent.settings.read import read_yaml


# What the plans show of the data: of the recipes of a demonstration, and of the others
PLANS = {
    "block_building": ("108 items of demo", "8 items of"),
    "bug_fixing": ("512 items of demo", "items of humaneval"),
    "class_completion": ("items of demo", "items of"),
    "writing": ("items of demo", "items of"),
}
PEER_CONFIGS = sorted((Path(__file__).parents[1] / "tasks" / "writing" / "peer_configs").glob("*.yaml"))
CONFIGS = [path for family in PLANS for path in sorted((RECIPES / family / "configs").glob("*.yaml"))]
BUGS = ["dataset.train_split=test[:2]", "dataset.eval_split=test[:1]", "dataset.mutants=1"]
CLASSES = ["dataset.train_split=test[1:2]", "dataset.eval_split=test[2:3]"]
TEXTS = ["dataset.name=demo", "dataset.train_split=train[:4]", "dataset.eval_split=test[:2]"]
# The recipes that train: a metric of the task, the number of turns, and settings that make the run small
TRAINED = {
    "grpo_block_building_demo": ("iou", 1, []),
    "str_build_magrpo_config": ("iou", 2, ["magrpo.num_turns=2"]),
    "grpo_bugs_config": ("fix", 1, BUGS),
    "magrpo_bugs_config": ("fix", 2, BUGS),
    "grpo_class_completion_demo": ("earned_reward", 1, ["dataset.eval_split=null"]),
    "magrpo_classeval_config": ("earned_reward", 2, CLASSES),
    "ac_tldr_config": ("constant_text", 1, [*TEXTS, "critic_model.name={model}"]),
    "magrpo_tldr_config": ("constant_text", 1, TEXTS),
}
SMALL = "max_completion_length=8 max_steps=1 items_per_device=1 per_device_train_batch_size=1 bf16=false".split()


@pytest.mark.parametrize("config", [*CONFIGS, *PEER_CONFIGS], ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_every_recipe_has_a_plan(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    family = config.parts[-3]
    run_script(family, algorithm_of(config), "--config", config, "--dry_run")
    out = capsys.readouterr().out
    assert "Dry run" in out and "env steps" in out and PLANS[family]["demo" not in config.stem] in out
    if config in CONFIGS:  # a peer's file does not name its family
        assert family in choose_task(None, read_yaml(str(config))).make_environment.__module__.split(".")
    if family == "writing":
        roles = [["writer"], ["background", "method"], ["summary", "detail"]]
        expected = roles[0 if config.stem.startswith(("grpo", "ac_")) else 1 if "arxiv" in config.stem else 2]
        assert all(f"{role}: " in out for role in expected)


@pytest.mark.parametrize("config", [path for path in CONFIGS if path.stem in TRAINED], ids=lambda path: path.stem)
def test_two_of_each_family_train_offline(config, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    algorithm = algorithm_of(config)
    metric, turns, settings = TRAINED[config.stem]
    small = [f"{algorithm}.{x}" for x in (*SMALL, f"output_dir={tmp_path / 'run'}")]
    settings = [x.format(model=tiny_model) for x in (*settings, "agent_model.name={model}")]
    run_script(config.parts[-3], algorithm, "--config", config, "--override", *small, *settings)
    out = capsys.readouterr().out
    assert f"'turn_1/{metric}'" in out and (f"'turn_2/{metric}'" in out) == (turns == 2)
    assert (tmp_path / "run" / "team.json").is_file()

"""The family of block building: commands, rewards, plans, prompts, data, recipes, files of CoMLRL."""

import itertools
import json
import random
import runpy
from pathlib import Path

import pytest
from matplotlib.image import imread
from scripts import RECIPES

from trl_multiagent import cli
from trl_multiagent.configs.recipes.block_building import demo
from trl_multiagent.configs.recipes.block_building.demo import PALETTES, DemoDataset, demo_items, demonstrate
from trl_multiagent.environments.base import Turn
from trl_multiagent.tasks.block_building import BlockBuildingEnvironment, load_block_dataset
from trl_multiagent.tasks.block_building.data import BlockDataset, text_item, wall_item
from trl_multiagent.tasks.block_building.environment import (
    MODES,
    build,
    commands_of,
    house_metrics,
    read_orders,
    read_target,
    wall_metrics,
)

from prepared import parse_recipe


WALL = wall_item("wall", ["##.", ".##"])  # 4 places of 6; (1, 0) and (1, 1) are on top of each other
TARGET = read_target(WALL)
PALETTE = ("stone", "oak_planks")
HOUSE = {
    "task_id": "hut",
    "layers": [["SS", "SS"], ["W.", ".W"]],
    "origin": [0, 0, 0],
    "inventory": [["S", "stone"], ["W", "glass"]],
}


def read(answer, **settings):
    orders = read_orders(answer, TARGET, **{"palette": PALETTE, "max_commands": 9, **settings})
    return [str(command) for command in orders.commands], orders.refused


def planned(environment, item):
    target, palettes = read_target(item), environment.palettes
    return {role: "\n".join(map(str, commands_of(target, palettes, role))) for role in environment.roles}


@pytest.mark.parametrize(
    ("answer", "expected", "refused"),
    [
        ("/setblock 0 1 0 stone", ["/setblock 0 1 0 stone"], 0),
        (
            "```\n- /setblock 0 1 0 minecraft:Stone \n2) setblock 1 1 0 stone\n```",
            ["/setblock 0 1 0 stone", "/setblock 1 1 0 stone"],
            0,
        ),
        ("/fill 2 0 0 1 1 0 oak_planks", ["/fill 1 0 0 2 1 0 oak_planks"], 0),
        ("/setblock 0 0 0 air", ["/setblock 0 0 0 air"], 0),
        ("/setblock 0 0 0 glass", [], 1),  # the partner's
        ("/setblock 3 0 0 stone\n/setblock -1 0 0 stone\n/fill 0 0 0 0 0 1 stone", [], 3),  # outside
        ("/setblock ~1 0 0 stone\n/setblock 1.0 0 0 stone\n/setblock 0 0 stone\n/setblock 0 0 0 stone x", [], 4),
        ("/fill 0 0 0 " + "9" * 5000 + " 1 0 stone", [], 0),
        ("/fill 0 0 0 99999999999999999999 1 0 stone\n/setblock \x00 \u2028İ", [], 2),
        ("/setblock 0 0 0 stone" + " " * 300, [], 0),
        ("/setblock ٠ 0 0 stone\n/fillet 0 0 0", [], 2),
        ("I place stone at 0 0 0.\n/give stone", [], 0),
    ],
)  # fmt: skip
def test_commands_are_read(answer, expected, refused):
    assert read(answer) == (expected, refused)


def test_the_number_of_commands_and_the_stock_are_limited():
    two = "/setblock 0 0 0 stone\n/setblock 1 0 0 stone\n"
    assert read(two * 9, max_commands=3)[0] == (two * 2).splitlines()[:3]
    assert read("/fill 0 0 0 2 0 0 stone\n" + two + two, stock={"stone": 2}) == (two.split("\n")[:2], 3)
    orders = read_orders("/kill @e\n/kill\n" + two, TARGET, PALETTE, max_commands=1)
    assert orders.kills and not orders.commands  # it counts as one


def test_a_very_long_answer_can_be_read():
    text = ("/fill 0 0 0 2 1 0 stone\n" * 100_000) + " " * 10**6
    assert len(read_orders(text, TARGET, PALETTE, 150).commands) == 150


def test_later_commands_and_later_agents_win():
    first = read_orders("/fill 0 0 0 1 0 0 stone\n/setblock 0 0 0 air", TARGET, PALETTE, 9)
    second = read_orders("/setblock 1 0 0 oak_planks", TARGET, PALETTE, 9)
    assert build({"a": first}) == {(1, 0, 0): ("stone", "a")}
    assert build({"a": first, "b": second}) == {(1, 0, 0): ("oak_planks", "b")}


@pytest.mark.parametrize(
    ("blocks", "reward", "iou"),
    [
        # 2 · covered - 1.5 · extra - adjacent - 0.25 · missing; two palettes of two blocks
        ({}, -0.5, 0.0),
        ({(0, 1): "oak_planks", (1, 1): "glass", (1, 0): "stone", (2, 0): "obsidian"}, 2.0, 1.0),
        # Alike, and 1 of 2 pairs
        ({(0, 1): "oak_planks", (1, 1): "birch_planks", (1, 0): "stone"}, 1.5 - 0.5 - 0.25, 0.75),
        ({(0, 1): "stone", (1, 1): "oak_planks", (1, 0): "stone", (2, 0): "oak_planks"}, 2.0 - 0.25, 1.0),
        ({(0, 0): "stone", (2, 1): "oak_planks"}, -1.5 - 0.25, 0.0),  # only where nothing should be
        ({(0, 0): "stone", (0, 1): "stone"}, 0.5 - 0.75 - 1.0 - 0.5, 0.2),
    ],
)  # fmt: skip
def test_rewards_of_walls_by_hand(blocks, reward, iou):
    built = {(x, y, 0): (block, "a") for (x, y), block in blocks.items()}
    palettes = {"a": ("oak_planks", "stone"), "b": ("glass", "obsidian")}
    metrics = wall_metrics(TARGET, built, palettes)
    assert metrics["total_reward"] == pytest.approx(reward) and metrics["iou"] == iou
    assert metrics["passed"] == (reward == 2.0)


@pytest.mark.parametrize(
    ("changes", "count_air", "reward", "iou"),
    [
        # of 8 places, 4 are stone, 2 glass and 2 air
        ({}, True, 1.0, 1.0),
        ({(0, 0, 0): "glass"}, True, 7 / 8, 1.0),
        ({(1, 1, 0): "stone", (0, 1, 0): None}, True, 6 / 8, 5 / 7),
        ({(1, 1, 0): "stone", (0, 1, 0): None}, False, 5 / 7, 5 / 7),
        (None, True, 2 / 8, 0.0),  # nothing built
        (None, False, 0.0, 0.0),
    ],
)
def test_rewards_of_houses_by_hand(changes, count_air, reward, iou):
    target = read_target(HOUSE)
    blocks = {} if changes is None else {**target.blocks, **changes}
    built = {place: (block, "a") for place, block in blocks.items() if block is not None}
    metrics = house_metrics(target, built, 0.5, count_air)
    assert metrics["total_reward"] == pytest.approx(reward - 0.05) and metrics["iou"] == pytest.approx(iou)
    assert metrics["passed"] == (changes == {})


def test_spiders_hurt_unless_somebody_drives_them_away():
    spiders = {"num": 3, "atk_low": 2, "atk_high": 2}
    environment = BlockBuildingEnvironment("house_build", spider=spiders, player={"hp": 10})
    silence = dict.fromkeys(environment.roles, "")
    actions = [silence, {**silence, "builder_2": "/kill"}]
    quiet, driven = environment.score([load_block_dataset("house_build")[0]] * 2, actions, [()] * 2)
    assert driven.reward - quiet.reward == pytest.approx(0.06)
    assert BlockBuildingEnvironment("house_build", spider={**spiders, "num": 9}).damage(HOUSE) == 1.0
    assert "/kill" in environment.prompts(HOUSE, ())["builder_1"]


@pytest.mark.parametrize("name", ["str_build", "house_build"])
@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_a_plan_earns_the_largest_reward(name, num_agents):
    palettes = None
    if num_agents == 3:
        blocks = ["white_concrete", "obsidian", "stone_stairs", "stone_bricks", "planks", "air"]
        palettes = {f"mason_{k}": blocks[2 * k : 2 * k + 2] if name == "str_build" else blocks for k in range(3)}
    environment = BlockBuildingEnvironment(name, palettes, num_agents, limited_resource=True)
    for item in load_block_dataset(name):
        (outcome,) = environment.score([item], [planned(environment, item)], [()])
        is_small = num_agents == 3 and item["task_id"] in "THOX"  # too few blocks to use five kinds
        assert is_small or outcome.reward == pytest.approx(environment.metric_ranges["reward"][1]), item["task_id"]
        assert outcome.metrics["refused"] == 0 and (is_small or outcome.metrics["passed"] == 1)
        shares = [outcome.metrics[f"blocks_of_{role}"] for role in environment.roles]
        assert min(shares) > 0.3 * max(shares)  # nobody is idle


def test_the_first_prompt_shows_the_target_and_the_agents_own_blocks():
    item = text_item("L")
    prompt = BlockBuildingEnvironment().prompts(item, ())["builder_2"]
    assert "y=4 #....\n" in prompt and "y=0 ####.\n" in prompt and "Your blocks: white_concrete, obsidian\n" in prompt
    assert "At most 150 commands" in prompt and "oak" not in prompt
    listed = BlockBuildingEnvironment(provide_graph=False, num_agents=1).prompts(item, ())["builder"]
    assert "0 4 0\n0 3 0\n" in listed and "####" not in listed and "oak_planks, stone, white" in listed
    house = BlockBuildingEnvironment("house_build", {"a": ["stone"], "b": ["glass"]}, limited_resource=True)
    prompts = house.prompts(HOUSE, ())
    assert "0 0 0 1 0 1 stone\n0 1 0 0 1 0 glass\n1 1 1 1 1 1 glass\n" in prompts["a"]
    assert "stone (3)" in prompts["a"] and "glass (1)" in prompts["b"]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("score_feedback", ["Your last build earned 0.00 of 2.\n"]),
        ("position_feedback", ["0 1 0\n1 1 0\n1 0 0\n2 0 0\n", "do not touch"]),
        ("perfect_feedback", ["/setblock 0 1 0 ", "/setblock 2 0 0 "]),
        ("position_modification", ["1 0 0 #\n", "2 1 0 air\n", "2 0 0 #\n"]),
        ("rect_modification", ["1 0 0 2 0 0 #\n", "2 1 0 2 1 0 air\n"]),
    ],
)
def test_feedback(mode, expected):
    environment = BlockBuildingEnvironment(mode=mode)
    action = {"builder_1": "/setblock 0 1 0 stone\n/setblock 2 1 0 stone", "builder_2": "/setblock 1 1 0 obsidian"}
    (outcome,) = environment.score([WALL], [action], [()])
    assert outcome.reward == pytest.approx(1.0 - 0.75 - 0.5)
    outcome.metrics["total_reward"] = 0.0
    prompts = environment.prompts(WALL, [Turn({}, action, outcome)])
    together = "".join(prompts.values())
    assert all(text in together for text in expected) and all("The box is empty again" in x for x in prompts.values())
    assert set(MODES) == {mark.args[1][k][0] for mark in test_feedback.pytestmark for k in range(len(MODES))}
    limited = BlockBuildingEnvironment(mode=mode, limit=1)
    assert mode[-6:] != "cation" or limited.prompts(WALL, [Turn({}, action, outcome)])["builder_1"].count(" #\n") == 1


def test_names_and_limits_of_an_environment():
    for wrong, message in (
        ({"num_agents": 3}, "each of the 3 agents"),
        ({"palettes": {"a": ["air"], "b": ["stone"]}}, "each of the 2 agents"),
        ({"palettes": {"a": ["oak planks"], "b": ["stone"]}}, "'oak planks' cannot be the name of a block"),
    ):
        with pytest.raises(ValueError, match=message):
            BlockBuildingEnvironment(**wrong)
    environment = BlockBuildingEnvironment(max_commands=7)
    assert [environment.num_commands(role) for role in environment.roles] == [4, 3]
    other = BlockBuildingEnvironment(max_commands=7, mode="score_feedback")
    assert environment.resume_settings() != other.resume_settings()
    assert environment.metric_ranges["reward"] == (-3.0, 2.0) and "str_build" in repr(environment)
    shown = environment.show_answers("builder_1", environment.prompts(WALL, ())["builder_1"], {"builder_2": "/kill"})
    assert "cannot see" not in shown


def test_contradictions_and_other_spellings_in_settings():
    with pytest.raises(ValueError, match="which is 'str_build'"):
        DemoDataset(name="demo", type="house_build")
    assert BlockDataset(name="mine.jsonl", type="house_build").kind == "house_build"
    environment = BlockBuildingEnvironment(palettes={"a": ["minecraft:Stone"], "b": ["glass"]})
    assert environment.palettes["a"] == ("stone",)
    house = {**HOUSE, "inventory": [["S", "minecraft:stone"], ["W", "glass"]]}
    assert read_target(house) == read_target(HOUSE)


def test_files_are_read_and_checked(tmp_path):
    def load(row, kind):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        return load_block_dataset(str(tmp_path / "rows.jsonl"), None, kind).to_list()

    assert load({"text": "ab"}, "str_build")[0]["layers"] == text_item("AB")["layers"]
    assert read_target(load(HOUSE, "house_build")[0]) == read_target(HOUSE)
    with pytest.raises(ValueError, match="row 1: `text` must be 1 to 20 letters"):
        load({"text": "A1"}, "str_build")
    for layers in ([["SS"], ["S"]], [["SS", "W", "SSW"]], [["S?"]], [["."]], 5, [["S" * 5000]]):
        with pytest.raises(ValueError, match="row 1: `layers` must be lists"):
            load({**HOUSE, "layers": layers}, "house_build")
    with pytest.raises(ValueError, match="one of \\['train', 'test'\\]"):
        DemoDataset(name="demo").load("validation")


def test_the_demo_divides_its_walls_like_a_chessboard(monkeypatch):
    train, test = (DemoDataset(name="demo").load(split).to_list() for split in ("train", "test"))
    assert len(train) > 3 * len(test) and not [item for item in test if item["layers"] in [x["layers"] for x in train]]
    for name in ("SKIPS", "STRAYS", "MONOTONOUS"):
        monkeypatch.setattr(demo, name, 0.0)
    environment = BlockBuildingEnvironment(palettes=PALETTES)
    covered = set()
    for seed, item in itertools.product(range(8), demo_items("train")[:3]):
        rng = random.Random(seed)
        action = {role: demonstrate(item, PALETTES[role], False, rng) for role in environment.roles}
        assert max(len(answer.splitlines()) for answer in action.values()) <= 3
        metrics = environment.score([item], [action], [()])[0].metrics
        assert metrics["extra"] == metrics["refused"] == 0
        covered.add(metrics["covered"] == 1.0)
    assert covered == {True, False}  # they agree by chance
    prompts, answers = zip(*demo.make_demonstrations(60, random.Random(0)), strict=True)
    assert {"builder_1." in x for x in prompts} == {True, False} and max(x.count("\n") for x in answers) > 3


def test_a_build_can_be_drawn(tmp_path):
    draw_build = runpy.run_path(str(RECIPES / "block_building" / "draw_build.py"))["draw_build"]
    for environment, item in ((BlockBuildingEnvironment(), WALL), (BlockBuildingEnvironment("house_build"), HOUSE)):
        action = {"builder_1": "/setblock 0 0 0 stone", "builder_2": "/fill 0 0 0 1 1 0 obsidian"}
        draw_build(tmp_path / "build.png", environment, item, action)
        assert imread(tmp_path / "build.png").std() > 0.01


@pytest.mark.parametrize(("name", "algorithm"), [("str_build", "magrpo"), ("house_build", "iac")])
def test_files_of_comlrl_have_a_plan(name, algorithm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = str(Path(__file__).parent / "peer_configs" / f"{name}_{algorithm}_config.yaml")
    cli.main(["run", algorithm, "--config", config, "--dry_run"])
    out, err = capsys.readouterr()
    assert "builder_1: Qwen/Qwen3-4B-Instruct-2507" in out and "8 items of " + name in out and "4 turns" in out
    assert "computed in bfloat16" in out and "_path" in err  # their data file is not read
    argv = "--task block_building --override task.max_commands=7 wandb.project=null".split()
    recipe = parse_recipe(algorithm, None, ["--config", config, *argv])
    environment = recipe.make_environment()
    assert environment.kind == name and environment.max_commands == 7 and recipe.training_args.use_chat_template
    assert environment.palettes["builder_2"][:2] == ("white_concrete", "obsidian")
    is_house = name == "house_build"
    assert environment.draw == is_house and environment.spiders["num"] == 3 * is_house


def test_the_mapping_of_another_task_is_refused(tmp_path, refused):
    (tmp_path / "peer.yaml").write_text("task: {max_commands: 3}\nagent_model: {name: x}\n")
    assert "`block_building` is not a known setting; see --help all, or set the `task` that" in refused(
        cli.main, ["run", "magrpo", "--task", "code_generation", "--config", str(tmp_path / "peer.yaml"), "--dry_run"]
    )

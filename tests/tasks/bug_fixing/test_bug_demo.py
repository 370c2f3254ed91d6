"""The embedded demo of bug fixing: its functions, its demonstrations and its configurations."""

import random
import statistics
from pathlib import Path

import pytest
import yaml

from trl_multiagent.runs.prepared import parse_recipe
from trl_multiagent.tasks.bug_fixing import TASK, BugFixingEnvironment
from trl_multiagent.tasks.bug_fixing.data import demo_items, demonstrate, draw_functions, write_fix, write_tests


CONFIGS = Path(__file__).resolve().parents[3] / "recipes" / "bug_fixing" / "configs"


def all_cases(function) -> str:
    """The tests of all three cases of a function."""
    other = next(x for x in "abc" if x not in function.letters)
    return "".join(f"assert f('{x}') == {function.call(x)}\n" for x in (*function.letters, other))


def test_a_team_that_tests_all_cases_and_repairs_the_function_earns_everything():
    items = demo_items("test", num_mutants=3, seed=0)
    functions = draw_functions()["test"]
    actions = [{"tester": all_cases(x), "fixer": x.source} for x in functions]
    outcomes = BugFixingEnvironment().score(items, actions, [()] * len(items))
    assert {outcome.reward for outcome in outcomes} == {4.0}
    assert not {*draw_functions()["train"]} & {*functions} and len(items) == 64
    kept = [{"fixer": item["faulty"]} for item in items]
    assert {x.reward for x in BugFixingEnvironment(1).score(items, kept, [()] * len(items))} == {0.0}


def test_demonstrations_are_mediocre():
    rng = random.Random(0)
    items = demo_items("train[:100]", num_mutants=1, seed=0)
    functions = draw_functions()["train"]
    actions = [
        {"tester": write_tests(function, rng), "fixer": write_fix(function, item, rng)}
        for function, item in zip(functions, items, strict=False)
    ]
    outcomes = BugFixingEnvironment().score(items, actions, [()] * len(items))
    assert 1.0 < statistics.fmean(outcome.reward for outcome in outcomes) < 2.0
    means = {name: statistics.fmean(x.metrics[name] for x in outcomes) for name in ("fix", "tests", "passed")}
    assert all(0.2 < mean < 0.7 for mean in means.values()), means


def test_demonstrations_answer_the_prompts_of_all_roles():
    item = demo_items("train", 1, 1)[0]
    team, alone = (BugFixingEnvironment(n).prompts(item, ()) for n in (2, 1))
    beginnings = {prompt.partition("def f")[0] for prompt, _ in demonstrate(40, random.Random(0))}
    assert beginnings == {prompt.partition("def f")[0] for prompt in (*team.values(), *alone.values())}


def test_splits_select_items_and_others_are_refused():
    assert [item["task_id"] for item in demo_items("test[:2]+train[5:6]", 1, 0)] == ["test/0", "test/1", "train/5"]
    assert len(demo_items(None, 1, 0)) == 512
    for split in ("validation", "train[900:]"):
        with pytest.raises(ValueError, match="of the generated data"):
            demo_items(split, 1, 0)


@pytest.mark.parametrize("algorithm", ["magrpo", "grpo", "iac", "maac"])
def test_every_configuration_scores_as_many_answers(algorithm):
    config = CONFIGS / f"{algorithm}_bug_fixing_demo.yaml"
    section = yaml.safe_load(config.read_text())[algorithm]
    assert section["items_per_device"] * section["num_generations"] == 32 and section["max_steps"] == 80
    recipe = parse_recipe(algorithm, TASK, ["--config", str(config), "--dry_run"], "test")
    train, held_out = recipe.load_datasets()
    assert (len(train), len(held_out)) == (512, 64) and not recipe.dataset.may_be_hub_id

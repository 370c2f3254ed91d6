import random
import re

import pytest

from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.configs.recipes.demo.model import AUX_FAULTS, MAIN_FAULTS, write_aux, write_main
from trl_multiagent.configs.recipes.demo.problems import ASSERTS, demo_dataset, demo_problems, demo_prompts
from trl_multiagent.tasks.code_generation import CodeGenerationEnvironment


def passed(source: str, item: dict) -> int:
    """Number of the item's asserts that a program passes."""
    namespace = {}
    exec(source, namespace)
    count = 0
    for line in item["test"].splitlines()[1:]:
        try:
            exec(line.strip().replace("candidate", item["entry_point"]), namespace)
            count += 1
        except (AssertionError, TypeError, ValueError, IndexError):
            pass
    return count


def test_splits_share_no_problem():
    train, test = demo_problems("train"), demo_problems("test")
    assert (len(train), len(test)) == (386, 96)
    assert not {problem.name for problem in train} & {problem.name for problem in test}
    assert {problem.family.argument for problem in test} == {"xs", "s"}
    with pytest.raises(ValueError, match=r"'validation' does not select .*\['train', 'test'\]"):
        demo_dataset("validation")
    assert demo_dataset("test[:32]")["task_id"] == demo_dataset("test")["task_id"][:32]


def test_rows_have_the_schema_of_humaneval():
    for split, rows in (("train", 1158), ("test", 96)):
        dataset = demo_dataset(split)
        assert dataset.column_names == ["task_id", "prompt", "entry_point", "test", "canonical_solution"]
        assert len(set(dataset["task_id"])) == len(dataset) == rows
        for item in dataset:
            assert item["prompt"].startswith(f"def {item['entry_point']}(")
            assert item["test"].count("    assert candidate(") == ASSERTS


def test_canonical_solutions_and_examples_are_right():
    for item in [*demo_dataset("test"), *demo_dataset("train")]:
        solution = item["prompt"] + item["canonical_solution"]
        assert passed(solution, item) == ASSERTS
        call, result = re.search(r">>> (.*)\n    (.*)\n", item["prompt"]).groups()
        namespace = {}
        exec(solution, namespace)
        assert eval(call, namespace) == eval(result)


def test_only_agents_of_one_convention_solve_a_problem():
    problems = {problem.name: problem for problem in demo_problems("test")}
    for item in demo_dataset("test"):
        problem = problems[item["entry_point"]]
        for aux in "AB":
            for main in "AB":
                program = write_aux(problem, aux) + write_main(problem, main)
                assert passed(program, item) == (ASSERTS if aux == main else 0), program


def test_both_ways_to_split_the_work_are_paid_in_full():
    problems = {problem.name: problem for problem in demo_problems("test")}
    items = [
        item for item in demo_dataset("test") if "_negate_" in item["entry_point"] or "order_" in item["entry_point"]
    ]
    teams = [(item, convention) for item in items for convention in "AB"]
    actions = []
    for item, convention in teams:
        problem = problems[item["entry_point"]]
        actions.append({"aux": write_aux(problem, convention), "main": write_main(problem, convention)})
    with Sandbox() as sandbox:
        environment = CodeGenerationEnvironment(reward_kind="earned", sandbox=sandbox)
        outcomes = environment.score([item for item, _ in teams], actions, [()] * len(teams))
    assert len(teams) > 20 and [outcome.reward for outcome in outcomes] == pytest.approx([4.0] * len(teams))
    assert all(0.3 < outcome.metrics["size_share"] <= 0.5 for outcome in outcomes)


def test_faults_are_faults():
    problem = demo_problems("test")[0]
    item = demo_dataset("test")[0]
    good = {"aux": write_aux(problem, "A"), "main": write_main(problem, "A")}
    for role, write, faults in (("aux", write_aux, AUX_FAULTS), ("main", write_main, MAIN_FAULTS)):
        for fault in faults:
            bad = write(problem, "A", fault, random.Random(0))
            assert bad != good[role]
            try:
                result = passed("".join({**good, role: bad}.values()), item)
            except SyntaxError:
                assert fault == "syntax"
            except NameError:
                assert fault == "name"
            else:
                assert result == ASSERTS if fault == "solo" else result < ASSERTS // 2, bad


def test_prompts_hold_the_problem_and_end_with_the_role():
    item = demo_dataset("test")[0]
    prompts = demo_prompts(item)
    assert list(prompts) == ["aux", "main"]
    for role, prompt in prompts.items():
        assert item["prompt"] in prompt and prompt.endswith(f"# {role}:\n")

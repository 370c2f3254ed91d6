import random

from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.configs.recipes.demo.model import AUX_FAULTS, MAIN_FAULTS, write_aux, write_main
from trl_multiagent.configs.recipes.demo.problems import demo_problems
from trl_multiagent.configs.recipes.demo.report import conventions


def test_conventions_are_told_apart_by_behaviour():
    problems, answers, expected = [], [], []

    def add(problem, aux_code, main_code, aux, main):
        problems.append(problem)
        answers.append({"aux": aux_code, "main": main_code})
        expected.append({"aux": aux, "main": main})

    for problem in demo_problems("test")[:4]:
        argument = problem.argument
        for aux in "AB":
            for main in "AB":
                add(problem, write_aux(problem, aux), write_main(problem, main), aux=aux, main=main)
        # Other texts, same behaviour: a loop that keeps and maps, and a main that copies what it got
        loop = f"def aux(v):\n    out = []\n    for x in v:\n        if {problem.condition.code}:\n"
        loop += f"            out.append({problem.map.code})\n    return out\n"
        copy = (
            f"def {problem.name}({argument}):\n    ys = [x for x in aux({argument})]\n    return "
            f"{problem.reduction.code}\n"
        )
        add(problem, loop, copy, aux="B", main="B")
    # What the reward leaves out of an answer does not count here either
    add(problem, write_aux(problem, "B") + "def aux(v)]\n    return", write_main(problem, "B"), aux="B", main="B")
    for fault in AUX_FAULTS:
        aux_code = write_aux(problem, "B", fault, random.Random(1))
        add(problem, aux_code, write_main(problem, "B"), aux=None, main="B")
    for fault in MAIN_FAULTS:
        main_code = write_main(problem, "A", fault, random.Random(1))
        add(problem, write_aux(problem, "A"), main_code, aux="A", main=None)

    with Sandbox(check_timeout=5.0) as sandbox:
        assert conventions(problems, answers, sandbox) == expected

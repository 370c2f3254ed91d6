import pytest

from trl_multiagent.code.sandbox import Check, Verdict
from trl_multiagent.tasks.code_generation import CodeGenerationEnvironment, load_code_dataset


ITEM = {
    "task_id": "Toy/0",
    "prompt": 'import math\n\ndef scale(x):\n    return 10 * x\n\ndef f(xs):\n    """Scaled sum."""\n',
    "entry_point": "f",
    "test": (
        "def check(candidate):\n"
        "    assert True\n"
        "    assert candidate([1, 2]) == 30\n"
        "    assert candidate([]) == 0\n"
        "    for n in range(3):\n"
        "        assert candidate([n]) == scale(n)\n"
        "    assert candidate([4]) == 40, 'four'\n"
    ),
}
AUX = "def aux(xs):\n    return sum(xs)\n"
MAIN = "def f(xs):\n    total = aux(xs)\n    return scale(total)\n"


SANDBOX = {"check_timeout": 2.0}


class FakeSandbox:
    """Answers with given statuses, and remembers what it was asked; every experiment costs a test."""

    def __init__(self, *statuses, calls=1):
        self.statuses = statuses
        self.calls = calls
        self.batches = []

    def run(self, programs):
        self.batches.append(list(programs))
        checks = tuple(Check(status, f"assert {k}") for k, status in enumerate(self.statuses))
        return [
            Verdict(Check("passed", ""), checks, dict.fromkeys(one.watch, self.calls), effective=one.experiments)
            for one in programs
        ]


def score(sandbox, aux, main, item=ITEM, **kwargs):
    num_agents = 1 if aux is None else 2
    environment = CodeGenerationEnvironment(num_agents, sandbox=sandbox, **kwargs)
    joint_action = {"main": main} if aux is None else {"aux": aux, "main": main}
    return environment.score([item], [joint_action], [[]])[0]


NO_RETURN = "def {}(xs):\n    print(xs)\n"
BROKEN = "def {}(xs):\n    return xs xs\n"


@pytest.mark.parametrize(
    ("aux", "main", "expected"),
    [
        (AUX, MAIN, 4.0),
        # definitions: 0.4 and 0.6; without the entry point scoring stops
        ("", "", 0.0),
        (AUX, "", 0.4),
        (AUX, NO_RETURN.format("f"), 0.4),
        (AUX, MAIN.replace("def f", "def g"), 0.4),
        # syntax: 0.5; otherwise scoring stops
        (AUX, BROKEN.format("f"), 1.0),
        (BROKEN.format("aux"), MAIN, 1.0),
        ("def aux(xs:\n    return 1", MAIN, 0.6),
        # tests: passed / total
        ("", "def f(xs):\n    return scale(sum(xs))\n", 2.1),
        (AUX, "def f(xs):\n    return scale(sum(xs))\n", 2.5),
        (AUX, "def f(xs):\n    return 'wrong'\n", 1.5),
        (AUX, "def f(xs):\n    return 0\n", 1.75),
        (AUX, "def f(xs):\n    return 1 / 0\n", 1.5),
        (AUX, "import nowhere_to_be_found\ndef f(xs):\n    return nowhere_to_be_found.f(xs)\n", 1.5),
        # aux used: 0.5, with a test passed; more than a wrapper: 1.0
        (AUX, "def f(xs):\n    return aux(xs) + 1\n", 1.5),
        ("def aux(xs):\n    return scale(sum(xs))\n", "def f(xs):\n    return aux(xs)\n", 3.0),
        (AUX, AUX + "def f(xs):\n    return scale(aux(xs))\n", 2.5),
        # a value thrown away: -0.5
        (AUX, "def f(xs):\n    aux(xs)\n    return scale(sum(xs))\n", 3.5),
        # an aux that works in place has no return value, but may be used
        ("def aux(xs):\n    xs.append(0)\n", "def f(xs):\n    aux(xs)\n    return scale(sum(xs))\n", 3.1),
        ("def aux(xs):\n    xs[:] = [sum(xs)]\n", "def f(xs):\n    aux(xs)\n    return scale(xs[0])\n", 3.6),
        # aux is called by other functions: what runs decides
        (AUX, "def f(xs):\n    return scale(list(map(aux, [xs]))[0])\n", 4.0),
        (AUX, "def f(xs):\n    return scale([*map(aux, xs), sum(xs)][-1]) if not xs else scale(sum(xs))\n", 2.5),
        (AUX, "def f(xs):\n    tools = {'sum': aux}\n    return scale(tools['sum'](xs))\n", 4.0),
    ],
)
def test_the_levels_of_the_reward(sandbox, aux, main, expected):
    outcome = score(sandbox, aux, main)
    assert outcome.reward == pytest.approx(expected, abs=1e-9)
    parts = ("definition_reward", "syntax_reward", "execution_reward", "collab_aux_usage", "collab_non_wrapper")
    total = sum(outcome.metrics[name] for name in parts) - outcome.metrics["collab_ignored_aux_call_penalty"]
    assert outcome.metrics["total_reward"] == outcome.reward == pytest.approx(total, abs=1e-9)
    assert outcome.metrics["tests_total"] == 4.0
    assert outcome.metrics["test_pass_rate"] == outcome.metrics["tests_passed"] / 4


@pytest.mark.parametrize(
    ("main", "expected"),
    [("def f(xs):\n    return scale(sum(xs))\n", 2.1), (BROKEN.format("f"), 0.6), (MAIN, 1.1), ("nothing", 0.0)],
)
def test_a_single_agent_reaches_2_1(sandbox, main, expected):
    outcome = score(sandbox, None, main)
    assert outcome.reward == pytest.approx(expected, abs=1e-9)
    assert outcome.metrics["collab_aux_usage"] == 0.0


@pytest.mark.parametrize(
    "hijack",
    [
        "def scale(x):\n    return 0\n",
        "sum = scale = lambda x: 0\ndef g(xs):\n    return sum, scale\n",
        "class Equal:\n    def __eq__(self, other):\n        return True\nEQUAL = Equal()\ndef g():\n    return "
        "EQUAL\n",
        "import builtins\nbuiltins.range = lambda n: []\ndef g():\n    return builtins\n",
    ],
)
def test_module_level_code_does_not_change_what_the_checks_expect(sandbox, hijack):
    wrong = score(sandbox, AUX + hijack, hijack + "def f(xs):\n    return -1\n")
    assert wrong.metrics["tests_passed"] == 0.0


@pytest.mark.parametrize(
    ("main", "static", "executed"),
    [
        # aux is called, and what it returns decides
        (MAIN, 4.0, 4.0),
        # the call stands in a branch that no test takes
        ("def f(xs):\n    return scale(aux(xs) if len(xs) > 9 else sum(xs))\n", 4.0, 2.5),
        # the only tests in which it is called fail
        ("def f(xs):\n    return 0 if xs == [] else aux(xs)\n", 2.0 + 1.25, 1.75),
        # a value that matters only because there is one is used, as in the published table
        ("def f(xs):\n    total = aux(xs)\n    return scale(sum(xs)) if total is not None else 0\n", 4.0, 4.0),
        # a value that changes nothing
        ("def f(xs):\n    return scale(sum(xs)) if aux(xs) != 'x' else 0\n", 4.0, 3.5),
        # an altered value makes it loop: that is a difference too
        ("def f(xs):\n    n = aux(xs)\n    while n != sum(xs):\n        pass\n    return scale(n)\n", 4.0, 4.0),
        # values that are only compared with each other
        ("def f(xs):\n    return scale(sum(xs)) if aux(xs) == aux(xs[::-1]) != aux([*xs, 1]) else 0\n", 4.0, 4.0),
        ("MEMO = {}\ndef f(xs):\n    return MEMO.setdefault(aux(xs), scale(sum(xs)))\n", 4.0, 4.0),
        # thrown away, by its text and in effect: taken off once
        ("def f(xs):\n    aux(xs)\n    return scale(sum(xs))\n", 3.5, 3.5),
    ],
)
def test_collaboration_is_what_running_the_tests_shows(sandbox, main, static, executed):
    assert score(sandbox, AUX, main).reward == pytest.approx(executed)
    assert score(sandbox, AUX, main, collaboration="executed").reward == pytest.approx(executed)
    assert score(sandbox, AUX, main, collaboration="static").reward == pytest.approx(static)


def test_one_batch_is_one_call_of_the_sandbox_and_the_order_is_kept(sandbox):
    environment = CodeGenerationEnvironment(sandbox=sandbox)
    mains = [MAIN, "", BROKEN.format("f"), "def f(xs):\n    return 0\n", MAIN]
    actions = [{"aux": AUX, "main": main} for main in mains]
    rewards = [outcome.reward for outcome in environment.score([ITEM] * 5, actions, [[]] * 5)]
    assert rewards == pytest.approx([4.0, 0.4, 1.0, 1.75, 4.0])

    fake = FakeSandbox("passed", "passed", "passed", "passed")
    CodeGenerationEnvironment(sandbox=fake).score([ITEM] * 5, actions, [[]] * 5)
    # equal programs of a batch run once in the sandbox
    assert [len(batch) for batch in fake.batches] == [3, 2] and len({*fake.batches[1]}) == 1
    program = fake.batches[0][0]
    assert program.entry_point == "f" and program.checks == ITEM["test"]
    assert program.setup == "import math\n\ndef scale(x):\n    return 10 * x"
    assert AUX.strip() in program.source and MAIN.strip() in program.source


def test_reference_solutions_reach_the_single_agents_maximum(sandbox, shared_data):
    for name in ("humaneval.jsonl", "mbpp_sanitized.jsonl"):
        items = load_code_dataset(str(shared_data / name)).to_list()[::24]
        actions = [{"main": item["prompt"] + item["canonical_solution"]} for item in items]
        environment = CodeGenerationEnvironment(num_agents=1, sandbox=sandbox)
        rewards = [outcome.reward for outcome in environment.score(items, actions, [[]] * len(items))]
        assert rewards == pytest.approx([2.1] * len(items))

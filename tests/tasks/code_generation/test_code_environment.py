import re

import pytest
from omegaconf import OmegaConf

from trl_multiagent.code.sandbox import Check, Program, Sandbox, Verdict
from trl_multiagent.environments.base import Outcome, Turn
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.tasks.code_generation import CodeGenerationEnvironment
from trl_multiagent.tasks.code_generation.environment import CodePrompts
from trl_multiagent.tasks.code_generation.reward import CodeResult, analyze


ITEM = {
    "task_id": "Toy/0",
    "prompt": (
        'def helper(a, b):\n    return a\n\ndef solve(xs: list[int], key=(1, ")"), *rest) -> int:\n    '
        '"""Solves it."""\n'
    ),
    "entry_point": "solve",
    "test": (
        "def check(candidate):\n    assert candidate([1]) == 1\n    assert candidate([2]) == 2\n    assert "
        "candidate([3]) == 3\n"
    ),
}
AUX = "def aux(x):\n    secret_of_aux = x\n    return secret_of_aux\n"
MAIN = "def solve(xs, key=0, *rest):\n    secret_of_main = aux(xs)\n    return secret_of_main[0]\n"
PASSED = Check("passed", "assert candidate([1]) == 1")
FAILED = Check("failed", "assert candidate([2]) == 2")
LOADED = Check("passed", "")


class NoSandbox:
    def run(self, programs):
        raise AssertionError("nothing is to run")


def environment(**settings):
    return CodeGenerationEnvironment(**{"sandbox": NoSandbox(), **settings})


def turn(result):
    prompts = {"aux": "first", "main": "first"}
    return Turn(prompts, {"aux": AUX, "main": MAIN}, Outcome(0.0, info=result))


def result(*checks, aux=AUX, main=MAIN, definitions=LOADED):
    analysis = analyze(ITEM["prompt"], "solve", aux, main)
    return CodeResult(analysis, Verdict(definitions, checks) if checks else None)


def feedback(outcome, mode, sandbox_slice="all", num_agents=2):
    env = environment(mode=mode, sandbox_slice=sandbox_slice, num_agents=num_agents)
    return env.prompts(ITEM, [turn(result(FAILED)), turn(outcome)])


# Feedback


def test_other_names_of_modes():
    outcome = result(PASSED, FAILED)
    assert feedback(outcome, "feedback") == feedback(outcome, "level_feedback") != feedback(outcome, "signals")
    assert feedback(outcome, "signals") == feedback(outcome, "level_passed")


def test_level_feedback_names_what_is_missing_or_wrong():
    prompts = feedback(result(aux="def aux(x):\n    y = x x", main="def solve(xs):\n    print(xs)"), "level_feedback")
    assert "- Your function `aux`: MISSING, `aux` does not return a value" in prompts["aux"]
    assert "- Your partner's function `solve`: MISSING, `solve` does not return a value" in prompts["aux"]
    assert "- Syntax: ERROR, code for `aux`, line 2, column " in prompts["main"]
    assert "- Tests: not run" in prompts["main"]

    other = result(main="def other(xs):\n    return 1")
    assert "- Use of `aux`: no main function" in feedback(other, "level_passed")["main"]
    assert "- Implementation: not found" in feedback(other, "level_passed")["main"]

    ignoring = "def solve(xs):\n    aux(1)\n    y = aux(2)\n    aux(3)\n    return 1"
    main = feedback(result(FAILED, main=ignoring), "level_feedback")["main"]
    assert "called, but its result is not used\n" in main

    thin = feedback(result(FAILED, main="def solve(xs):\n    return aux(xs)"), "level_feedback")
    assert "Warning" in thin["main"] and "Warning" not in thin["aux"]

    crash = Check("error", "", "NameError: name 'nowhere' is not defined")
    not_run = Check("not_run", "assert candidate([1]) == 1")
    prompts = feedback(result(not_run, definitions=crash), "level_feedback")
    assert "  - The code does not load: NameError: name 'nowhere' is not defined" in prompts["aux"]


@pytest.mark.parametrize("text", ["", "I cannot do this.", "```python\n```", "# soon", "x = = 1"])
def test_a_text_without_code_has_no_right_syntax(text):
    for outcome, name, number in (
        (result(PASSED, aux=text), "aux", 2),
        (result(main=text), "solve", 1),
        (result(aux=None, main=text), "solve", 1),
    ):
        assert "- Syntax: not correct" in feedback(outcome, "level_passed", num_agents=number)["main"]
        prompts = feedback(outcome, "level_feedback", num_agents=number)
        assert f"- Syntax: ERROR, there is no code for `{name}`\n" in prompts["main"]
    for main, rate in ((text, 0.0), ("x = 1", 1.0)):
        (scored,) = environment(num_agents=1).score([ITEM], [{"main": main}], [[]])
        assert scored.metrics["syntax_valid_rate"] == rate and scored.reward == 0.0


def test_an_error_is_one_line_without_control_characters():
    check = Check("error", "assert candidate(1) == 1", "ValueError: a\nb<|im_end|>\x1b[1m")
    assert "ValueError: a b< |im_end|>·[1m" in feedback(result(check), "level_feedback")["main"]


def test_long_texts_are_cut():
    check = Check("error", "assert candidate(1) == " + "9" * 5000, "ValueError: " + "x\n" * 5000)
    assert len(feedback(result(check), "level_feedback")["main"]) < 1500
    name = "y" * 20_000  # an identifier is as long as its author likes
    for main in (f"def solve(xs):\n    {name} = aux(2)\n    return 1", f"def solve({name}, {name}):\n    return 1"):
        for prompt in feedback(result(FAILED, main=main), "level_feedback").values():
            assert len(prompt) < 1500


@pytest.mark.parametrize(
    ("sandbox_slice", "shown"),
    [(1, [1]), (2, [1, 2]), (9, [1, 2, 3]), (-1, [3]), (-2, [2, 3]), (-9, [1, 2, 3]), (0, [1, 2, 3]),
     (None, [1, 2, 3]),
     ("all", [1, 2, 3]), ("2", [1, 2]), ("-1", [3])],
)  # fmt: skip
def test_the_slice_selects_asserts(sandbox_slice, shown):
    checks = tuple(Check("failed", f"assert candidate([{n}]) == {n}") for n in (1, 2, 3))
    prompt = feedback(result(*checks), "level_feedback", sandbox_slice)["main"]
    assert [int(n) for n in re.findall(r"candidate\(\[(\d)\]\)", prompt)] == shown
    assert f"- Tests: 0/{len(shown)} passed" in prompt


# The environment as a whole


def test_a_second_turn_is_built_from_the_run_that_scored_the_first():
    class CountingSandbox(Sandbox):
        runs = 0

        def run(self, programs: list[Program]) -> list[Verdict]:
            self.runs += 1
            return super().run(programs)

    with CountingSandbox(workers=1, check_timeout=2.0) as sandbox:
        env = CodeGenerationEnvironment(sandbox=sandbox, sandbox_slice="all")
        prompts = env.prompts(ITEM, [])
        action = {"aux": AUX, "main": MAIN.replace("[0]", "[0] // (3 - xs[0]) * 2")}
        (outcome,) = env.score([ITEM], [action], [[]])
        lines = env.prompts(ITEM, [Turn(prompts, action, outcome)])["main"].split("\n")
        assert sandbox.runs == 1
    assert outcome.metrics["tests_passed"] == 0.0
    (failed, doubled, raised) = [line for line in lines if line.startswith("  - ")]
    assert failed == "  - assert candidate([1]) == 1: the assertion is false"
    assert doubled == "  - assert candidate([2]) == 2: the assertion is false"
    assert raised.startswith("  - assert candidate([3]) == 3: ZeroDivisionError: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_agents": 3}, "takes 1 or 2 agents, not 3"),
        ({"mode": "expert_edits"}, "The mode 'expert_edits' needs `expert`"),
        ({"mode": "bandit"}, "Unknown mode 'bandit': choose level_feedback, level_passed, passed, plain"),
        ({"sandbox_slice": "some"}, "`sandbox_slice` must be a whole number, 'all' or None, not 'some'"),
        ({"reward_kind": "earned", "collaboration": "static"}, "because it runs programs"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        environment(**settings)


# Hidden tests


@pytest.mark.parametrize("mode", ["plain", "passed", "level_passed", "level_feedback"])
@pytest.mark.parametrize(("sandbox_slice", "hidden_tests"), [("all", 2), (1, 2), (-2, 2), (9, 5), ("all", 0)])
def test_feedback_depends_on_no_hidden_test(mode, sandbox_slice, hidden_tests):
    def prompts(statuses):
        checks = [Check(status, f"assert candidate([{k}]) == {k}", "E") for k, status in enumerate(statuses)]
        env = environment(mode=mode, sandbox_slice=sandbox_slice, hidden_tests=hidden_tests)
        return env.prompts(ITEM, [turn(result(*checks))])

    shown = ["passed", "failed", "error", "passed"][: 4 - min(4, hidden_tests)]
    texts = [
        prompts([*shown, *[status] * min(4, hidden_tests)]) for status in ("passed", "failed", "timeout", "not_run")
    ]
    if hidden_tests:
        assert texts[0] == texts[1] == texts[2] == texts[3]
    for k in range(len(shown), 4):
        assert not any(f"[{k}]" in prompt for prompt in texts[1].values())


def test_settings_that_are_compared_when_a_run_resumes():
    sandbox = {"sandbox": Sandbox(workers=1)}
    new = {"hidden_tests": 1, "external_prompt_passthrough": False, "prompt_files": {"aux": "{prompt}"}}
    changed = environment(**new | {"prompt_files": CodePrompts(aux="{prompt}")}, **sandbox)
    settings, default = changed.resume_settings(), environment(**sandbox).resume_settings()
    assert {name for name in settings if settings[name] != default[name]} == {*new}
    assert {name: settings[name] for name in new} == new
    assert "hidden_tests=1" in repr(changed) and "prompt_files=['aux']" in repr(changed)
    assert "hidden_tests" not in repr(environment())


# Prompts that a user replaces


async def slow_aux(item):
    return item["prompt"]


def own_aux(item):
    return [{"role": "system", "content": "S"}, {"role": "user", "content": item["prompt"]}]


def own_feedback(item, feedback, history):
    return f"{len(history)} {item['task_id']} {feedback}"


def test_templates_and_functions_replace_prompts(tmp_path):
    (tmp_path / "main.txt").write_bytes(
        "\ufeffWrite {signature} for é: {{{prompt}}} {entry_point} {task_id}\r\n".encode()
    )
    files = CodePrompts(
        aux=f"{__name__}:own_aux",
        main=str(tmp_path / "main.txt"),
        feedback=f"{__name__}:own_feedback",
        main_feedback="{function} {entry_point}\n{feedback}\n{response}",
    )
    env = environment(prompt_files=files, mode="passed")
    first = env.prompts(ITEM, [])
    assert first["aux"] == own_aux(ITEM)
    signature = "def solve(xs: list[int], key=(1, ')'), *rest) -> int:"
    assert first["main"] == f"Write {signature} for é: {{{ITEM['prompt']}}} solve Toy/0\n"
    later = env.prompts(ITEM, [turn(result(PASSED))])
    assert later == {"aux": "1 Toy/0 All levels passed", "main": f"solve solve\nAll levels passed\n{MAIN}"}
    # Feedback in the place of the problem
    env = environment(prompt_files=files, mode="passed", external_prompt_passthrough=False)
    later = env.prompts(ITEM, [turn(result(PASSED))])
    assert later["aux"][1]["content"] == "1 Toy/0 All levels passed"
    assert later["main"].startswith(f"Write {signature} for é: {{solve solve\n")


def test_a_single_agent_has_the_prompts_of_main():
    env = environment(num_agents=1, prompt_files=CodePrompts(main="M {prompt}", feedback="F {function}"))
    assert env.prompts(ITEM, []) == {"main": f"M {ITEM['prompt']}"}
    assert env.prompts(ITEM, [turn(result(PASSED, aux=None))]) == {"main": "F solve"}


@pytest.mark.parametrize(
    "text",
    ["Cost: ${prompt}\n", r"\${prompt}", r"\\${prompt} \\ ${{x}} \\\${{", "Try again.", "}}"],
)
def test_the_texts_of_templates_are_saved(tmp_path, text):
    """`Try again.` is a path, too."""
    (tmp_path / "aux.txt").write_text(text)
    files = CodePrompts(aux=str(tmp_path / "aux.txt"), main=f"{__name__}:own_aux")
    template = files.prompts["aux"].template
    assert template.rstrip("\n") == text.rstrip("\n")
    (tmp_path / "aux.txt").unlink()
    read = OmegaConf.to_container(OmegaConf.create(files.saved()), resolve=True)
    assert read["main"] == f"{__name__}:own_aux"
    assert CodePrompts(**read).prompts["aux"].template == template


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("aux", "nowhere/aux.txt", "`prompt_files.aux` is 'nowhere/aux.txt', but there is no such file"),
        ("aux", "{{problem}}", "has the field {problem}, which is not known. Fields are {prompt}, {entry_point},"),
        ("main", "{{prompt", "is not a template"),
        ("aux", "no_such_module:f", "importing no_such_module"),
        ("aux", "{module}:own_feedback", "must be a function of item"),
        ("aux", "{module}:slow_aux", "which is `async`"),
    ],
)
def test_wrong_prompt_files_are_named(name, value, message):
    with pytest.raises(ValueError) as error:
        CodePrompts(**{name: value.format(module=__name__)})
    assert message in str(error.value) and f"`prompt_files.{name}`" in str(error.value)


def test_a_function_that_returns_no_prompt_is_named():
    env = environment(prompt_files=CodePrompts(main="builtins:len"))
    with pytest.raises(TaskError, match=r"`prompt_files.main` returned 4 .*a prompt is text"):
        env.prompts(ITEM, [])


def test_an_evaluation_tells_the_tests_that_feedback_hides():
    """The answer passes the first of two tests, which is the one that feedback shows by default."""
    item = {"task_id": "T/0", "prompt": "def f(x):\n", "entry_point": "f"}
    item["test"] = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 3\n"
    half, whole = ({"main": f"def f(x):\n    return {value}\n"} for value in ("2", "x + 1"))
    with Sandbox() as sandbox:
        for settings, expected in (
            ({}, [0.0, 1.0, 0.0]),
            ({"sandbox_slice": -1}, [1.0, 1.0, 0.0]),  # the second one is shown
            ({"sandbox_slice": "all"}, [None, None, None]),
            ({"sandbox_slice": "all", "hidden_tests": 1}, [0.0, 1.0, 0.0]),
            ({"sandbox_slice": "all", "mode": "plain"}, [0.0, 1.0, 0.0]),
        ):
            env = CodeGenerationEnvironment(sandbox=sandbox, num_agents=1, warn_about_items=False, **settings)
            outcomes = env.evaluate([item] * 3, [half, whole, {"main": "def f(x:\n"}], [()] * 3)
            assert [outcome.metrics.get("passed_hidden") for outcome in outcomes] == expected, settings
            assert env.metric_ranges["reward"] == (0.0, pytest.approx(2.1))

"""
Class completion: the methods of a class are divided among agents, who write them apart; the merged class is tested.

Every agent sees the skeleton of one Python class, in which some methods are only described, and writes the methods
that are its own. One agent writes them all. The methods replace the skeleton's; other functions of an answer
become helpers. In later turns, agents learn which methods are missing, and how the class does in the test classes that
test several methods together.

All share one reward, of two kinds:

- `earned`, at most 1: mean, over the test classes of single methods, of the share of their test methods that pass.
  Test methods that a constant passes do not count, and neither do those that feedback shows.
- `compat`, the table of CoMLRL: 2 · methods written by their own agent / methods + 4 · test methods passed / test
  methods - methods written by more than one agent / methods, or 0 if the merged class does not compile.
"""

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_multiagent.code.dependencies import (
    IMPORTS,
    Statement,
    all_tables,
    binds_of,
    bound_names,
    can_be_written,
    is_foreign,
    names_in,
)
from trl_multiagent.code.extraction import is_fragment, read_module
from trl_multiagent.code.sandbox import Program, Sandbox, Verdict
from trl_multiagent.console import shown_line
from trl_multiagent.environments.base import PASSED, History, JointAction, Outcome, Prompt, Prompts
from trl_multiagent.environments.prompt_files import PromptFiles
from trl_multiagent.environments.task import setting
from trl_multiagent.tasks.programs import ProgramEnvironment


REWARD_VERSION = 8
EARNED, COMPAT = KINDS = ("earned", "compat")
METHODS, TESTS, OVERLAP = 2.0, 4.0, -1.0  # the parts of `compat`
RANGES = {EARNED: (0.0, 1.0), COMPAT: (OVERLAP, METHODS + TESTS)}
CODE_FEEDBACK, PLAIN = MODES = ("code_feedback", "plain")
MAX_FAILURES = 5  # failing tests that feedback shows
DIVISIONS = ("balanced", "parameter_count")
EVEN = 0.2  # shares of the work that differ by less count as equal
DECORATORS = ("staticmethod", "classmethod", "property")  # that a helper method may have


# Prompts


UNSEEN = "You cannot see each other's answers."


@dataclass
class ClassPrompts(PromptFiles):
    """The section `prompt_files`."""

    methods: str | None = setting("Template or function for an agent's first prompt: a path, or package.module:name.")

    takes = {"methods": (("skeleton", "class_name", "methods"), ("item", "own", "num_agents"))}


def first_prompt(item: dict, own: Sequence[str], num_agents: int) -> str:
    """Returns an agent's first prompt."""
    if num_agents == 1:
        work = "Write the methods of the Python class below that have no body yet."
    else:
        others = "partner writes" if num_agents == 2 else f"{num_agents - 1} partners write"
        work = (
            f"You and your partner{'s' * (num_agents > 2)} complete the Python class below. You write some "
            f"methods, your {others} the others. {UNSEEN}"
        )
    return f"""\
{work}

{item["skeleton"].strip()}

{request(own)}
"""


def request(own: Sequence[str]) -> str:
    """Returns the end of every prompt, which asks for the agent's own methods."""
    if not own:
        return "All methods belong to your partners. Answer with a single line: pass\n\nYour answer:"
    return f"""\
Your methods: {", ".join(own)}
- Keep their names and parameters. They may call the other methods of the class, which do what their descriptions say.
- Answer with the definitions of your methods alone: no other methods, no explanation, no code fence.

Your methods:"""


def feedback_prompt(result: str, own: Sequence[str]) -> str:
    """Returns an agent's prompt of a later turn; `result` is a text of [`describe_result`], or empty."""
    again = "Write your methods again, all of them, and better." if own else ""
    return "\n\n".join(part for part in (result, again, request(own)) if part) + "\n"


def describe_result(item: dict, verdict: Verdict, missing: Sequence[str]) -> str:
    """
    Describes the results of a merged class, and the methods that no agent wrote that had to. Only tests of several
    methods are shown.
    """
    lines = [f"These methods are missing: {', '.join(missing)}."] if missing else []
    together = [test for test in item["tests"] if test.split(".")[0] not in item["method_tests"]]
    shown = [check for check in verdict.checks if check.source in together]
    if verdict.definitions.status != "passed":
        lines.append(f"The class cannot be defined: {shown_line(verdict.definitions.error)}")
    elif shown:
        failing = [check for check in shown if check.status != "passed"]
        passing = len(shown) - len(failing)
        lines.append(f"The completed class passes {passing} of {len(shown)} tests of its parts together.")
        lines += [f"- {check.source}: {shown_line(check.error) or check.status}" for check in failing[:MAX_FAILURES]]
    return "\n".join(lines)


# Who writes which methods


def divide(item: dict, num_agents: int, division: str) -> list[list[str]]:
    """
    Divides the methods of an item.

    `"parameter_count"` gives methods with only the parameter `self` to the first agent and all others to the second;
    agents beyond these get none. `"balanced"` gives every agent about the same number of statements of the reference,
    and of the ways to do so prefers those in which many methods call one of another agent. The first method belongs to
    the first agent.

    Returns:
        `list[list[str]]`: The names of each agent's methods, in the order of the class. A list may be empty: with
        `"parameter_count"`, or if there are fewer methods than agents.
    """
    names = item["methods"]
    if division == "parameter_count" and num_agents > 1:
        sides = [int(number != 1) for number in item["parameters"]]
    else:
        sides = balanced(item, num_agents)
    return [[name for name, own in zip(names, sides, strict=True) if own == side] for side in range(num_agents)]


def balanced(item: dict, num_agents: int) -> list[int]:
    """Improves the alternating division, by one or two changes at a time, until no change is better. Deterministic."""
    names, weights = item["methods"], item["weights"]
    calls = [(k, names.index(name)) for k, used in enumerate(item["uses"]) for name in used]

    def score(sides: list[int]) -> tuple[int, float, float, float]:
        work = [(side, weight / sum(weights)) for side, weight in zip(sides, weights, strict=True)]
        shares = [sum(part for side, part in work if side == agent) for agent in range(num_agents)]
        uneven = max(shares) - min(shares)
        crossing = sum(sides[a] != sides[b] for a, b in calls) / len(calls) if calls else 0.0
        return len({*sides}), -round(max(0.0, uneven - EVEN), 6), crossing, -round(uneven, 6)

    sides = [k % num_agents for k in range(len(names))]
    while True:
        best = max(changes(sides, num_agents), key=score, default=sides)
        if score(best) <= score(sides):
            break
        sides = best
    order = [*dict.fromkeys(sides)]  # the agent with the first method is the first
    return [order.index(side) for side in sides]


def changes(sides: list[int], num_agents: int) -> Iterator[list[int]]:
    """Yields every division in which at most two methods have another agent."""
    for a, b, first, second in itertools.product(*[range(len(sides))] * 2, *[range(num_agents)] * 2):
        changed = [*sides]
        changed[a], changed[b] = first, second
        yield changed


# Turns and rewards


class ClassCompletionEnvironment(ProgramEnvironment):
    """
    Several agents write the methods of one class. Each has its own methods, and sees the skeleton of the class. One
    agent writes them all.

    In later turns, agents learn which methods are missing, and how the class does in the test classes that test
    several methods together. The reward `earned` does not use these.

    Items are rows of [`load_class_dataset`]. The rewards are described in [`class_metrics`]; the one that `kind` does
    not choose is a metric.

    Args:
        num_agents (`int`, *optional*, defaults to `2`): Number of agents; their roles are `agent_0`, `agent_1` and so
            on.
        division (`str`, *optional*, defaults to `"balanced"`): `"balanced"` or `"parameter_count"`, see [`divide`].
        kind (`str`, *optional*, defaults to `"earned"`): Kind of reward, `"earned"` or `"compat"`.
        mode (`str`, *optional*, defaults to `"code_feedback"`): Feedback in later turns: `"code_feedback"`, or
            `"plain"` for none.
        make_prompt (`Callable`, *optional*): Writes the first prompt from the item, the agent's methods and the number
            of agents.
        prompt_files ([`ClassPrompts`], *optional*): A template or function that replaces the first prompt.
        sandbox ([`Sandbox`], *optional*): Runs the programs; by default one with default settings.
        keep_suspicious (`str` or `Path`, *optional*): Folder for the programs with a suspicious verdict. By default
            they are not stored.

    Raises `ValueError` if an argument is none of its choices.
    """

    watched_metrics = {
        "methods_written": "no answer contains a method that the agent was asked for",
        "tests_passed": "no class passes a test",
    }
    unseen = UNSEEN, "The answers of others are above."

    def __init__(
        self,
        num_agents: int = 2,
        division: str = DIVISIONS[0],
        kind: str = EARNED,
        mode: str = CODE_FEEDBACK,
        make_prompt: Callable[[dict, Sequence[str], int], str] = first_prompt,
        prompt_files: ClassPrompts | None = None,
        sandbox: Sandbox | None = None,
        keep_suspicious: str | Path | None = None,
    ):
        for name, value, choices in (("division", division, DIVISIONS), ("kind", kind, KINDS), ("mode", mode, MODES)):
            if value not in choices:
                raise ValueError(f"`{name}` is {value!r}; it must be one of {', '.join(choices)}.")
        self.roles = tuple(f"agent_{k}" for k in range(num_agents))
        self.division, self.kind, self.mode, self.make_prompt = division, kind, mode, make_prompt
        self.prompt_files = prompt_files or ClassPrompts()
        super().__init__(sandbox, keep_suspicious)
        shares = dict.fromkeys(("passed", "methods_written", "tests_passed", "overlap"), (0.0, 1.0))
        rewards = {f"{name}_reward": RANGES[name] for name in KINDS}
        self.metric_ranges = {"reward": RANGES[kind], "total_reward": RANGES[kind], **rewards, **shares}

    def __repr__(self) -> str:
        settings = f"division={self.division!r}, kind={self.kind!r}, mode={self.mode!r}"
        return f"ClassCompletionEnvironment(roles={self.roles}, {settings}, reward_version={REWARD_VERSION})"

    def resume_settings(self) -> dict[str, Any]:
        return {
            "reward_version": REWARD_VERSION,
            "division": self.division,
            "kind": self.kind,
            "mode": self.mode,
            "prompt_files": self.prompt_files.saved(),
            **super().resume_settings(),
        }

    def methods_of(self, item: dict) -> list[list[str]]:
        """Returns the names of each agent's methods, in the order of the roles."""
        return divide(item, len(self.roles), self.division)

    def prompts(self, item: dict, history: History) -> Prompts:
        division = dict(zip(self.roles, self.methods_of(item), strict=True))
        if not history:
            return {role: self._first_prompt(item, own) for role, own in division.items()}
        text = describe_result(item, *history[-1].outcome.info) if self.mode == CODE_FEEDBACK else ""
        return {role: feedback_prompt(text, own) for role, own in division.items()}

    def _first_prompt(self, item: dict, own: list[str]) -> Prompt:
        own_prompt = self.prompt_files.prompts.get("methods")
        if own_prompt is None:
            return self.make_prompt(item, own, len(self.roles))
        fields = {name: item[name] for name in ("skeleton", "class_name")}
        return own_prompt.make(fields | {"methods": ", ".join(own)}, item, own, len(self.roles))

    def score(self, items: list[dict], joint_actions: list[JointAction], histories: list[History]) -> list[Outcome]:
        """
        Scores joint actions. The `info` of an outcome is the results of the tests, and the methods that their agents
        did not write.
        """
        divisions = [self.methods_of(item) for item in items]
        answers = [
            [read_class(action[role], item["class_name"]) for role in self.roles]
            for item, action in zip(items, joint_actions, strict=True)
        ]
        verdicts = self.runner.run([*map(program_of, items, answers, divisions)])
        outcomes = []
        for item, own, division, verdict in zip(items, answers, divisions, verdicts, strict=True):
            pairs = zip(own, division, strict=True)
            missing = [name for answer, names in pairs for name in names if name not in answer.methods]
            metrics = class_metrics(item, verdict, own, missing)
            reward = metrics["total_reward"] = metrics[f"{self.kind}_reward"]
            outcomes.append(Outcome(reward, metrics, (verdict, missing), verdict.columns()))
        return outcomes


# Answers, and the class that they make


@dataclass
class Answer:
    """The code in one agent's answer."""

    # All functions, of each name the last that has a body
    methods: dict[str, ast.FunctionDef] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)  # names of those that are plain functions of the module
    imports: list[ast.stmt] = field(default_factory=list)


def find_class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    """Returns the class of a module with this name."""
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def functions_of(node: ast.Module | ast.ClassDef) -> list[ast.FunctionDef]:
    """Returns the functions that stand directly in a module or a class."""
    return [child for child in node.body if isinstance(child, ast.FunctionDef)]


def read_class(completion: str, class_name: str) -> Answer:
    """Reads an agent's answer: functions, or a class of that name with methods, in prose and fences or without."""
    (tree, end), answer = read_module(completion), Answer()
    owners = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    found = itertools.chain(functions_of(tree), *map(functions_of, owners))
    texts = {node: ast.unparse(node) for node in found if can_be_written(node)}
    foreign = binds_of(Statement(x, ast.unparse(x)) for x in tree.body if is_foreign(x))
    for node in sorted(texts, key=lambda node: (not is_fragment(node, texts, end), node.lineno)):
        if names_in(*node.decorator_list) & foreign:  # such as a test of the class
            continue
        answer.methods[node.name] = node
        first = next((argument.arg for argument in node.args.posonlyargs + node.args.args), "")
        is_method = any(ast.unparse(decorator) in DECORATORS for decorator in node.decorator_list)
        if node in tree.body and first not in ("self", "cls") and not is_method:
            answer.outside.add(node.name)
    imports = [node for node in tree.body if isinstance(node, IMPORTS) and not is_foreign(node)]
    answer.imports += [node for node in imports if getattr(node, "module", "") != "__future__"]
    return answer


def merge(item: dict, answers: Sequence[Answer], division: Sequence[Sequence[str]]) -> str:
    """
    Puts the agents' methods into the skeleton of an item, and returns the module. The `division` has the names of each
    agent's methods.

    A method counts only in the answer of the agent that it belongs to, and keeps the decorators of the skeleton. Other
    functions of an answer become helper methods, or functions beside the class, unless their name is taken or special
    (`__getattr__` would answer for the methods of others). Imports come first.
    """
    tree = ast.parse(item["skeleton"])
    owner = find_class(tree, item["class_name"])
    assert owner is not None  # the dataset has no other skeletons
    taken = bound_names(all_tables(item["skeleton"])[0]).union(node.name for node in functions_of(owner))
    imports, beside = [*ast.parse(item["imports"]).body], []
    written: dict[str, ast.FunctionDef] = {}
    for answer, names in zip(answers, division, strict=True):
        imports += answer.imports
        written |= {name: answer.methods[name] for name in names if name in answer.methods}
        for name, node in answer.methods.items():
            if name in taken or name.startswith("__"):
                continue
            taken.add(name)
            if name in answer.outside:
                beside.append(node)
            else:
                node.decorator_list = [part for part in node.decorator_list if ast.unparse(part) in DECORATORS]
                owner.body.append(node)
    for stub in functions_of(owner):
        if method := written.get(stub.name):
            method.decorator_list = stub.decorator_list
            owner.body[owner.body.index(stub)] = method
    tree.body[:0] = [*{ast.unparse(node): node for node in imports}.values(), *beside]
    return ast.unparse(ast.fix_missing_locations(tree))


def program_of(item: dict, answers: Sequence[Answer], division: Sequence[Sequence[str]]) -> Program:
    """Returns the program that runs an item's tests on the merged class, see [`merge`]."""
    own = {name: item[name] for name in ("check_timeout", "folder") if item.get(name)}
    source = merge(item, answers, division)
    return Program(source, item["class_name"], item["test"], item["imports"], unittest=True, **own)


def passed_by(verdict: Verdict) -> set[str]:
    """Returns the names of the test methods that a program passed."""
    return {check.source for check in verdict.checks if check.status == "passed"}


def class_metrics(item: dict, verdict: Verdict, answers: Sequence[Answer], missing: Sequence[str]) -> dict[str, float]:
    """
    Returns the metrics of a class from the results of its tests, with both rewards. `missing` are the methods that
    their agents did not write.
    """
    methods, passed = item["methods"], passed_by(verdict)
    cases: dict[str, list[bool]] = {}
    for test in item["counting"]:
        cases.setdefault(test.split(".")[0], []).append(test in passed)
    earned = sum(sum(results) / len(results) for results in cases.values()) / len(cases)
    written = 1 - len(missing) / len(methods)
    tests = sum(test in passed for test in item["tests"]) / len(item["tests"])
    overlap = sum(sum(name in answer.methods for answer in answers) > 1 for name in methods) / len(methods)
    compiles = not verdict.definitions.error.startswith(("SyntaxError", "IndentationError"))
    return {
        PASSED: float(earned == 1.0),
        "methods_written": written,
        "tests_passed": tests,
        "overlap": overlap,
        f"{EARNED}_reward": earned,
        f"{COMPAT}_reward": (METHODS * written + TESTS * tests + OVERLAP * overlap) * compiles,
    }

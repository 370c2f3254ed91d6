"""The input and the output of the sandbox, and the trusted checks as code that reports every assert on its own."""

import ast
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard


# What `Program.experiments` may contain: changes with which a program that passed tests runs again. If a test is then
# lost, what was changed matters. The last one changes nothing, and must have no effect. `helpers/ablation.py` makes
# them
EXPERIMENTS = ("nothing", "constant", "alone", "first", "control")
MAX_LINES = 40  # checks that a trace lists


class SandboxError(RuntimeError):
    """The sandbox itself failed. It says nothing about the program, and must never become a score."""


@dataclass(frozen=True)
class Program:
    """
    An untrusted program and the trusted checks that it has to pass.

    Args:
        source (`str`): Untrusted module source.
        entry_point (`str`): Name of the function in `source` that the checks call.
        checks (`str`): Trusted module source, asserts or a function `check(candidate)` with asserts in it. It runs
            whole; `candidate`, and the entry point's own name, stand for the program's function.
        setup (`str`, *optional*): Trusted source that runs before `checks` in the same namespace.
        watch (`tuple[str, ...]`, *optional*): Calls of these top-level functions of `source` are counted.
        needed (`tuple[int, ...]`, *optional*): Indices of checks. The first of them that does not pass ends the run.
        helper (`str`, *optional*): Untrusted module source that defines the one function in `watch`. It runs in a
            process of its own, and `source` calls the function by its name. Nothing but data passes between the two:
            numbers, texts, bytes and dates in built-in containers, and iterators of these, which are read at once. A
            call may change its arguments in place.
        experiments (`tuple[str, ...]`, *optional*): Changes to try on a program with a helper, each in a run of its
            own: in fresh processes, with all checks from the first one. An experiment has an effect, and is in
            `Verdict.effective`, if a check in `needed` does not pass. The first experiment without an effect is the
            last one that is tried. `"nothing"`: the program gets None for each value of the watched function, no
            change of an argument, and no exception. `"constant"`: it gets the first value each time, and no change of
            an argument. `"alone"`: the entry point returns what the watched function returns for its arguments.
            `"first"`: the entry point returns the first value that the watched function returned in this call.
            `"control"` replaces nothing. It has an effect, too, if the watched function gives different answers to
            equal calls, or if it answers differently when all its calls are repeated in a new process, in the
            opposite order and then in this one.
        check_timeout (`float`, *optional*): Seconds for each check, if fewer than the sandbox's. Each check that times
            out halves the limit for the checks after it.
        unittest (`bool`, *optional*): Whether `checks` is a module of test cases of `unittest`. Each test method is
            then a check, and the entry point may be a class.
        folder (`bool`, *optional*): Whether the program and the checks share an empty working directory of 4 MiB and
            255 files, and may import `sqlite3`. It is emptied whenever a new process of the program starts. Not every
            machine can give one, see [`Sandbox.has_folders`].

    Raises:
        ValueError: an experiment is unknown, or a program has experiments without a helper, or a helper without one
            function in `watch`.
    """

    source: str
    entry_point: str
    checks: str
    setup: str = ""
    watch: tuple[str, ...] = ()
    needed: tuple[int, ...] = ()
    helper: str = ""
    experiments: tuple[str, ...] = ()
    check_timeout: float | None = None
    unittest: bool = False
    folder: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.experiments if name not in EXPERIMENTS]
        if unknown:
            raise ValueError(f"`experiments` has {unknown[0]!r}, which is none of {', '.join(EXPERIMENTS)}.")
        if (self.experiments and not self.helper) or (self.helper and len(self.watch) != 1):
            raise ValueError("Experiments need a `helper` and its one function in `watch`.")


@dataclass(frozen=True)
class Check:
    """
    Outcome of one assert of the checks, or of one test method.

    Args:
        status (`str`): `"passed"`, `"failed"` (false), `"error"` (the call raised), `"timeout"`, or `"not_run"`
            (something before it ended the run).
        source (`str`): Source text of the assert, or the names of the test case and the method, such as
            `"TestStack.test_push"`.
        error (`str`): Type and message of the exception, empty when there was none.
    """

    status: Literal["passed", "failed", "error", "timeout", "not_run"]
    source: str
    error: str = ""


@dataclass(frozen=True)
class Verdict:
    """
    What running one program showed.

    Args:
        definitions (`Check`): Whether the module's own code ran.
        checks (`tuple[Check, ...]`): One entry per assert, in the order of the source.
        calls (`dict[str, int]`): How often each watched function was called in checks that passed, and before them
            outside of checks.
        effective (`tuple[str, ...]`): Experiments during which a needed check did not pass.
        seconds (`float`), cpu_seconds (`float`): Wall time and processor time of the whole program.
        memory_mb (`float`): Largest resident size of its processes, in MiB.
        suspicious (`tuple[str, ...]`): Actions that no honest program needs: audit events such as `"socket.connect"`,
            a broken protocol, an ended process. No status depends on it.
        tier (`str`): Protection that was in force.
    """

    definitions: Check
    checks: tuple[Check, ...]
    calls: dict[str, int] = field(default_factory=dict)
    effective: tuple[str, ...] = ()
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_mb: float = 0.0
    suspicious: tuple[str, ...] = ()
    tier: str = ""

    def columns(self) -> dict[str, str]:
        """Returns what the tests said, a line per check, and the suspicious acts, as texts for a trace."""
        checks = [self.definitions] * (self.definitions.status != "passed") + [*self.checks[:MAX_LINES]]
        lines = [
            f"{x.status:<8} {' '.join(x.source.split())[:160]}  {' '.join(x.error.split())[:120]}".rstrip()
            for x in checks
        ]
        more = [f"... {self.total - MAX_LINES} more"] if self.total > MAX_LINES else []
        return {"tests": "\n".join(lines + more), "suspicious": ", ".join(self.suspicious)}

    @property
    def passed(self) -> int:
        return sum(check.status == "passed" for check in self.checks)

    @property
    def total(self) -> int:
        return len(self.checks)

    @property
    def timeouts(self) -> int:
        return sum(check.status == "timeout" for check in (self.definitions, *self.checks))

    @property
    def out_of_memory(self) -> bool:
        return any(check.error.startswith("MemoryError") for check in (self.definitions, *self.checks))


@dataclass(frozen=True)
class Asserts:
    """
    A test and its asserts. An assert that is constantly true cannot fail and is left out.

    In the `code`, every assert is replaced by reports to three functions that its namespace must have:
    `__begin__(index)` before the assert is evaluated; `__end__(index, value, error=None)` after it, with the exception
    that it raised if that is one of the classes in `__caught__`; and `__settle__(indices)` after each statement of the
    module and of `check`, because the asserts in the statement will not run again.
    """

    code: str
    sources: tuple[str, ...]  # text of each assert, in the order of the source
    guards: tuple[int, ...]  # asserts that are constantly false: reaching one fails it
    has_check: bool  # whether the test defines a function `check(candidate)`. Whoever runs the test has to call it


class _Instrument(ast.NodeTransformer):
    def __init__(self) -> None:
        self.sources: list[str] = []
        self.guards: list[int] = []
        # Asserts of the current statement, without those in functions, which may run again
        self.inside: list[int] = []

    def body(self, statements: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in statements:
            self.inside.clear()
            if _is_check(node):
                node.body = [*self.body(node.body)]
                yield node
            else:
                yield self.visit(node)
                if self.inside:
                    yield ast.parse(f"__settle__({self.inside})").body[0]

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        before = [*self.inside]
        self.generic_visit(node)
        self.inside[:] = before
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        index = len(self.sources)
        if isinstance(node.test, ast.Constant):
            if node.test.value:
                return ast.Pass()
            self.guards.append(index)
        self.sources.append(ast.unparse(node))
        self.inside.append(index)
        return ast.parse(
            f"try:\n    __begin__({index})\n    __end__({index}, ({ast.unparse(node.test)}))\n"
            f"except __caught__ as __error__:\n    __end__({index}, False, __error__)"
        ).body[0]

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        if node.type is None or ast.unparse(node.type) == "BaseException":
            node.type = ast.Name("Exception", ast.Load())  # a test must not catch what ends a check or the test itself
        return self.generic_visit(node)


def _is_check(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name == "check"


@functools.lru_cache(maxsize=4096)
def read_asserts(test: str) -> Asserts:
    """
    Finds the asserts of a test. The result is cached. Raises `SyntaxError` or `ValueError` if the test is not Python.
    """
    instrument = _Instrument()
    tree = ast.parse(test)
    has_check = any(_is_check(node) for node in tree.body)
    tree.body = [*instrument.body(tree.body)]
    code = ast.unparse(ast.fix_missing_locations(tree))
    with warnings.catch_warnings(action="ignore"):  # such as the one about `x is 1`
        compile(code, "<test>", "exec", dont_inherit=True)  # finds errors that the parser accepts
    return Asserts(code, tuple(instrument.sources), tuple(instrument.guards), has_check)


@functools.lru_cache(maxsize=4096)
def read_test_methods(module: str) -> Asserts:
    """
    Finds the test methods of a module of `unittest`, which runs as it is. `sources` has their names, such as
    `"TestStack.test_push"`; of methods with the same name, the last one counts. Inherited ones are left out. The
    result is cached. Raises `SyntaxError` or `ValueError` if the module is not Python.
    """
    tree = ast.parse(module)
    compile(module, "<test>", "exec", dont_inherit=True)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    cases = {x.name: x for x in classes if any(ast.unparse(base).endswith("TestCase") for base in x.bases)}
    methods = [(case, x.name) for case in cases.values() for x in case.body if isinstance(x, ast.FunctionDef)]
    names = [f"{case.name}.{name}" for case, name in methods if name.startswith("test")]
    return Asserts(module, tuple(dict.fromkeys(names)), (), False)


def read_checks(checks: str, unittest: bool) -> Asserts:
    """Reads the checks of a program: asserts, or test methods of `unittest`."""
    return read_test_methods(checks) if unittest else read_asserts(checks)

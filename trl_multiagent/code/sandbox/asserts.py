"""Reads trusted tests: which asserts they have, and the same tests as code that reports every assert on its own."""

import ast
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard


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
        constant = isinstance(node.test, ast.Constant)
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.Pass()
        index = len(self.sources)
        self.sources.append(ast.unparse(node))
        self.inside.append(index)
        if constant:
            self.guards.append(index)
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as the one about `x is 1`
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

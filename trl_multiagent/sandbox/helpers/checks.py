"""Turns trusted checks into code that reports every assert on its own."""

import ast
import functools
from typing import NamedTuple


class Checks(NamedTuple):
    """Compiled checks."""

    setup: object  # code of the problem's set-up
    code: object  # of the checks, every assert replaced by a report
    sources: tuple  # text of each assert, in the order of the source
    guards: frozenset  # asserts that are constantly false: reaching one fails it
    has_check: bool  # whether the checks stand in a function `check(candidate)`, or at the top level


class _Instrument(ast.NodeTransformer):
    """
    Replaces asserts, so that one that fails or raises is recorded and the next statement runs. After each statement of the
    module and of `check`, a call of `__settle__` says that the asserts in it, loops included, have run to their end.
    """

    def __init__(self):
        self.sources = []
        self.guards = set()
        self.inside = []  # asserts of the statement that is visited, but for those in functions, which may run again

    def body(self, statements):
        for node in statements:
            self.inside.clear()
            if isinstance(node, ast.FunctionDef) and node.name == "check":
                node.body = [*self.body(node.body)]
                yield node
            else:
                yield self.visit(node)
                if self.inside:
                    yield ast.copy_location(ast.parse(f"__settle__({self.inside})").body[0], node)

    def visit_FunctionDef(self, node):
        before = [*self.inside]
        self.generic_visit(node)
        self.inside[:] = before
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assert(self, node):
        constant = isinstance(node.test, ast.Constant)
        if constant and node.test.value:
            return ast.copy_location(ast.Pass(), node)  # padding: it cannot fail
        index = len(self.sources)
        self.sources.append(ast.unparse(node))
        self.inside.append(index)
        if constant:
            self.guards.add(index)
        template = ast.parse(
            f"try:\n    __begin__()\n    __end__({index}, None)\n"
            f"except __caught__ as __error__:\n    __end__({index}, False, __error__)"
        ).body[0]
        template.body[1].value.args[1] = node.test
        for inner in ast.walk(template):
            ast.copy_location(inner, node)
        return template


@functools.lru_cache(maxsize=4096)
def compile_checks(setup: str, checks: str) -> Checks:
    """Compiles checks; the same ones once. Raises `SyntaxError` or `ValueError` if the trusted source is not Python."""
    instrument = _Instrument()
    tree = ast.parse(checks)
    tree.body = [*instrument.body(tree.body)]
    return Checks(
        compile(setup, "<setup>", "exec", dont_inherit=True),
        compile(ast.fix_missing_locations(tree), "<checks>", "exec", dont_inherit=True),
        tuple(instrument.sources),
        frozenset(instrument.guards),
        any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body),
    )

"""
Finds tests that cannot tell right answers from wrong ones.

The tests and the code before them in the prompt are read, not run. Some unusable tests only show when they run, such
as one with an assert that is never reached, or that the reference solution fails; these are not found here.
"""

import ast
import builtins
import importlib.util
import sys
import warnings

from trl_multiagent.code.dependencies import (
    FUNCTIONS,
    PARSE_ERRORS,
    all_tables,
    names_in,
    own_nodes,
    read_globals,
)


MODULE_NAMES = {*dir(builtins), "__file__", "__annotations__"}


def unusable_test(test: str, setup: str, entry_point: str) -> str:
    """
    Explains why a test cannot tell right answers from wrong ones. The result is empty if no reason was found.

    Args:
        test (`str`): Module source that defines `check(candidate)`.
        setup (`str`): Source that runs before the test in the same namespace.
        entry_point (`str`): Name of the function under test. The test may call it by this name or as `candidate`.
    """
    known = {entry_point, "candidate"} | bound_names(setup)
    if problem := _compile_problem(test) or _check_function_problem(ast.parse(test)) or source_problem(test, known):
        return problem
    tree = ast.parse(test)
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    if all(isinstance(node.test, ast.Constant) and node.test.value for node in asserts):
        return "has no assert that can fail"
    check = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"][-1]
    dependent = _dependent_names(tree, {"candidate", entry_point, (check.args.posonlyargs + check.args.args)[0].arg})
    # an assert of a constant is reached or not, depending on what the candidate returns
    if not any(isinstance(node.test, ast.Constant) or names_in(node.test) & dependent for node in asserts):
        return "has no assert that depends on the candidate"
    return ""


def source_problem(source: str, known: set[str]) -> str:
    """
    Explains why a module cannot run: a syntax error, an undefined name, or a missing module. Empty if its text shows
    none of these. `known` are the names that are defined before the module runs.
    """
    if problem := _compile_problem(source):
        return problem
    known = known | bound_names(source)
    if "*" not in known:
        for name in read_globals(all_tables(source)):
            if name not in known and name not in MODULE_NAMES:
                return f"uses the name `{name}`, which is neither defined nor imported"
    tree = ast.parse(source)
    guarded = {inner for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in guarded or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            return "has a relative import, but is not part of a package"
        for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]:
            module = name.split(".")[0]
            if module not in sys.stdlib_module_names and importlib.util.find_spec(module) is None:
                return f"imports `{module}`, which is not installed"
    return ""


def _compile_problem(source: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `x is 1` gives one, for example
            compile(source, "<source>", "exec", dont_inherit=True)  # finds errors that the parser does not
    except PARSE_ERRORS as error:
        return f"is not Python source: {error}"
    return ""


def bound_names(source: str) -> set[str]:
    """
    Returns the names that a module defines at its top level, and `"*"` if it has an import such as `from math import
    *`.
    """
    module, *tables = all_tables(source)
    names = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    for inner in tables:
        names |= {s.get_name() for s in inner.get_symbols() if s.is_declared_global() and s.is_assigned()}
    stars = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom))
    return names | {"*" for node in stars if node.names[0].name == "*"}


def _check_function_problem(tree: ast.Module) -> str:
    """Explains why `check(candidate)` cannot be called. Empty if it can."""
    definitions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS) and node.name == "check"]
    at_top = [node for node in definitions if node in tree.body]
    if not at_top:
        return f"does not define `check(candidate)`{' at its top level' if definitions else ''}"
    check = at_top[-1]
    for node in tree.body[tree.body.index(check) + 1 :]:
        if "check" in bound_names(ast.unparse(node)) and node not in at_top:
            return "defines `check`, and then assigns something else to the name"
    if isinstance(check, ast.AsyncFunctionDef):
        return "defines `check` as a coroutine, which would never be awaited: write `def check(candidate)`"
    arguments = check.args
    if len(arguments.posonlyargs + arguments.args) != 1 or arguments.vararg or arguments.kwonlyargs or arguments.kwarg:
        return "has a `check` that cannot be called: it must take one argument, the candidate"
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(*check.body)):
        return "defines `check` as a generator, whose body would never run: take `yield` out of it"
    return ""


def _dependent_names(tree: ast.Module, names: set[str]) -> set[str]:
    """
    Returns the names in a test whose values may depend on the candidate, which has the `names`. If a statement
    contains such a name, all names in the statement count. Names in different scopes are treated as the same.
    """
    flows: list[tuple[set[str], set[str]]] = []  # if a name in the first set is dependent, so are all in the second
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            flows.append((names_in(node), {node.name}))
            flows.append(({node.name}, {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}))
        elif isinstance(node, ast.stmt):
            flows.append((names_in(node), names_in(node) - MODULE_NAMES))
    dependent, before = set(names), 0
    while before != len(dependent):
        before = len(dependent)
        for read, changed in flows:
            if read & dependent:
                dependent |= changed
    return dependent

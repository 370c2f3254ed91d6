"""
Analyses the syntax trees of a team's answer: whether both functions are defined, and how main uses aux's function.

The program is joined in the order prompt, aux, main. If a name is defined twice, the last definition counts, as always in Python.
So main's entry point replaces one that aux wrote. An `aux` that main defines is main's own function, and calling it is not
collaboration.
"""

import ast
import re
import types
from dataclasses import dataclass

from trl_multiagent.environments.code_generation.collaboration import drops_value, is_thin_wrapper
from trl_multiagent.environments.code_generation.roles import AUX
from trl_multiagent.environments.python_code.definitions import VALUE
from trl_multiagent.environments.python_code.extraction import Code, join_sources, read_completion
from trl_multiagent.environments.python_code.names import FUNCTIONS, PARSE_ERRORS, all_tables, read_globals
from trl_multiagent.environments.python_code.problems import read_problem


# What the kind `earned` does not allow in a team's answer; see `reads_interpreter`
INTERPRETER_MODULES = set(
    """
    _thread atexit builtins contextvars ctypes dis gc importlib inspect os random resource secrets signal solution threading time traceback
    tracemalloc uuid weakref
    """.split()
)
INTERPRETER_NAMES = set(
    "__builtins__ __import__ breakpoint compile delattr dir eval exec getattr globals hash id input locals memoryview open setattr vars".split()
)
_RUNNING = (types.FrameType, types.CodeType, types.TracebackType)
_PAUSED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
INTERPRETER_ATTRIBUTES = {name for kind in (*_RUNNING, *_PAUSED) for name in vars(kind) if "_" in name.strip("_")}
INTERPRETER_ATTRIBUTES |= {"now", "today", "utcnow"}
DUNDERS = ("__init__", "__name__")
SYS = ("maxsize", "getsizeof", "setrecursionlimit", "float_info")


@dataclass(frozen=True)
class Analysis:
    """The facts that the syntax trees of a team's answer show."""

    source: str  # the whole program: the prompt's prefix, aux's part, main's part
    setup: str  # the prompt's prefix alone
    aux_problem: str  # why aux's answer does not define `aux` with a result, see `definitions.py`; empty if it does
    main_problem: str  # the same for main's answer and the entry point
    syntax_problem: str  # the parts of the program that do not parse, with place and reason
    without_code: tuple[str, ...] = ()  # the functions for which an agent answered with a text that contains no code
    # Whether code that the entry point needs names the aux agent's function. Only a run of the tests shows whether it is called
    names_aux: bool = False
    # Whether aux's text uses a function, class or variable that main's text defines. The entry point counts only if it has parameters
    # that the item's function lacks
    aux_uses_main: bool = False
    reads_interpreter: bool = False  # whether a text uses what tells apart programs that return the same values
    thin_wrapper: bool = False  # whether the entry point only returns the value of `aux`
    drops_value: bool = False  # whether `aux` returns a value, but a call stands by itself or nothing reads the value
    # The share of the characters of aux's completion, without white space, that belongs to `aux` and to the statements that it needs:
    # imports, variables, helpers, calls that fill a table, and repeated imports of the prompt. 0 without `aux`, 1 for a single agent
    aux_function_share: float = 1.0
    main_function_share: float = 1.0  # the same for main's completion and the entry point


def analyze(prompt: str, entry_point: str, aux_completion: str | None, main_completion: str) -> Analysis:
    """
    Analyses the raw answers of a team to a problem of the dataset, in which main writes the function `entry_point`. `aux_completion` is
    `None` for a single agent.
    """
    problem = read_problem(prompt, entry_point)
    prefix = problem.prefix
    aux = read_completion(aux_completion or "", AUX, prefix)
    main = read_completion(main_completion, entry_point, prefix)
    answers = [(entry_point, main)] if aux_completion is None else [(AUX, aux), (entry_point, main)]
    names_aux = _definitions_count(aux, main, entry_point) and any(AUX in statement.reads for statement in main.needed)
    return Analysis(
        source=join_sources(prefix, aux.source, main.source),
        setup=prefix,
        aux_problem=aux.problem,
        main_problem=main.problem,
        syntax_problem="; ".join(
            f"code for `{name}`, {code.error}" for name, code in ((AUX, aux), (entry_point, main)) if code.error
        ),
        without_code=tuple(name for name, code in answers if not code.found),
        names_aux=names_aux,
        aux_uses_main=names_aux and _uses_names_of(aux.source, main.source, prefix, entry_point, problem.signature),
        reads_interpreter=names_aux
        and (reads_interpreter(aux.source, prefix, entry_point) or reads_interpreter(main.source, prefix, AUX)),
        thin_wrapper=names_aux and is_thin_wrapper(main.needed, entry_point),
        drops_value=names_aux and aux.result == VALUE and drops_value(main.needed),
        aux_function_share=1.0 if aux_completion is None else aux.share,
        main_function_share=main.share,
    )


def _definitions_count(aux: Code, main: Code, entry_point: str) -> bool:
    """Returns whether `aux` and the entry point are the functions that the two agents define when the whole program runs."""
    if aux.result is None or main.result is None or aux.error or main.error or AUX in main.module.binders:
        return False
    statements = (*aux.module.statements, *main.module.statements)
    return not any({AUX, entry_point} & statement.declares for statement in statements)


def _uses_names_of(aux: str, main: str, prefix: str, entry_point: str, signature: str) -> bool:
    """
    Returns whether aux's code reads a global name that a statement of main binds, if aux and the prefix do not have the same statement. The
    entry point counts only if it has parameters that the item's `signature` lacks, because a call could then ask for another function.
    """
    try:
        own, given, others = ([ast.unparse(node) for node in ast.parse(code).body] for code in (aux, prefix, main))
        mains, *inner = all_tables("\n".join(one for one in others if one not in {*own, *given}))
        symbols = [*mains.get_symbols()]
        symbols += [one for table in inner for one in table.get_symbols() if one.is_declared_global()]
        bound = {symbol.get_name() for symbol in symbols if symbol.is_assigned()}
        if _parameters(main, entry_point) <= _parameters(f"{signature} pass", entry_point):
            bound -= {entry_point}
        return bool(read_globals(all_tables(aux)) & bound)
    except PARSE_ERRORS:  # the program cannot run either
        return False


def _parameters(source: str, name: str) -> set[tuple[str, int]]:
    """Returns the parameters of a module's function, as kinds and numbers."""
    functions = [node.args for node in ast.parse(source).body if isinstance(node, FUNCTIONS) and node.name == name]
    return {
        (kind, number)
        for one in functions
        for kind, found in ast.iter_fields(one)
        if "defaults" not in kind
        for number in range(len(found) if isinstance(found, list) else found is not None)
    } or {("none", len(functions))}


def reads_interpreter(source: str, prefix: str, other: str) -> bool:
    """
    Returns whether code uses time, chance, threads or the interpreter's own objects, changes a module, or uses attributes of the function
    `other`, which the other agent writes. Modules that the prompt's `prefix` imports are allowed.
    """
    try:
        tree, tables = ast.parse(source), all_tables(source)
        modules = INTERPRETER_MODULES - {name for node in ast.walk(ast.parse(prefix)) for name, _ in _imports(node)}
    except PARSE_ERRORS:  # the program cannot run either
        return False
    imported = {symbol.get_name() for table in tables for symbol in table.get_symbols() if symbol.is_imported()}
    for node in ast.walk(tree):
        if any(module in modules or (module == "sys" and name not in SYS) for module, name in _imports(node)):
            return True
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in INTERPRETER_ATTRIBUTES or (re.fullmatch("__.*__", node.attr) and node.attr not in DUNDERS):
                return True
            if (owner == "sys" and node.attr not in SYS) or (owner == other and not node.attr.startswith("cache_")):
                return True
            if owner in imported and not isinstance(node.ctx, ast.Load):
                return True
    return bool(read_globals(tables) & INTERPRETER_NAMES)


def _imports(node: ast.AST) -> list[tuple[str, str]]:
    """Returns the packages that a statement imports, each with the name in it; for `import sys`, an allowed one."""
    if isinstance(node, ast.ImportFrom):
        return [((node.module or "").partition(".")[0], alias.name) for alias in node.names]
    names = node.names if isinstance(node, ast.Import) else []
    return [(alias.name.partition(".")[0], alias.asname or SYS[0]) for alias in names]

"""
Analyses the syntax trees of a team's answer: whether both functions are defined, and how main uses aux's function.

The program is joined in the order prompt, aux, main. If a name is defined twice, the last definition counts, as always
in Python. So main's entry point replaces one that aux wrote. An `aux` that main defines is main's own function, and
calling it is not collaboration.
"""

import ast
from dataclasses import dataclass

from trl_multiagent.code.definitions import VALUE
from trl_multiagent.code.extraction import Code, join_sources, read_completion
from trl_multiagent.code.names import IMPORTS
from trl_multiagent.tasks.code_generation.collaboration import drops_value, is_thin_wrapper
from trl_multiagent.tasks.code_generation.roles import AUX
from trl_multiagent.tasks.problems import read_problem


@dataclass(frozen=True)
class Analysis:
    """The facts that the syntax trees of a team's answer show."""

    source: str  # the whole program: the prompt's prefix, aux's part, main's part
    setup: str  # the prompt's prefix alone
    aux_problem: str  # why aux's answer does not define `aux` with a result, see `definitions.py`; empty if it does
    main_problem: str  # the same for main's answer and the entry point
    syntax_problem: str  # the parts of the program that do not parse, with place and reason
    without_code: tuple[str, ...] = ()  # the functions for which an agent answered with a text that contains no code
    # Whether code that the entry point needs names the aux agent's function. Only a run of the tests shows whether it
    # is called
    names_aux: bool = False
    # If so, aux's part and main's part as programs of their own, each with the prefix and the imports of both
    apart: tuple[str, str] = ("", "")
    # The size of the smaller part over that of both, in nodes of the syntax tree: of `aux`, of the entry point, and of
    # what they need. 0 if the entry point does not name `aux`, None for a single agent
    size_share: float | None = None
    thin_wrapper: bool = False  # whether the entry point only returns the value of `aux`
    drops_value: bool = False  # whether `aux` returns a value, but a call stands by itself or nothing reads the value
    # The share of the characters of aux's completion, without white space, that belongs to `aux` and to the statements
    # that it needs: imports, variables, helpers, calls that fill a table, and repeated imports of the prompt. 0
    # without `aux`, 1 for a single agent
    aux_function_share: float = 1.0
    main_function_share: float = 1.0  # the same for main's completion and the entry point


def analyze(prompt: str, entry_point: str, aux_completion: str | None, main_completion: str) -> Analysis:
    """
    Analyses the raw answers of a team to a problem of the dataset, in which main writes the function `entry_point`.
    `aux_completion` is `None` for a single agent.
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
        apart=_apart(prefix, aux, main) if names_aux else ("", ""),
        size_share=None if aux_completion is None else _size_share(aux, main) if names_aux else 0.0,
        thin_wrapper=names_aux and is_thin_wrapper(main.needed, entry_point),
        drops_value=names_aux and aux.result == VALUE and drops_value(main.needed),
        aux_function_share=1.0 if aux_completion is None else aux.share,
        main_function_share=main.share,
    )


def _definitions_count(aux: Code, main: Code, entry_point: str) -> bool:
    """
    Returns whether `aux` and the entry point are the functions that the two agents define when the whole program runs.
    """
    if aux.result is None or main.result is None or aux.error or main.error or AUX in main.module.binders:
        return False
    statements = (*aux.module.statements, *main.module.statements)
    return not any({AUX, entry_point} & statement.declares for statement in statements)


def _size_share(aux: Code, main: Code) -> float:
    sizes = [sum(1 for statement in code.needed for _ in ast.walk(statement.node)) for code in (aux, main)]
    return min(sizes) / sum(sizes)


def _apart(prefix: str, aux: Code, main: Code) -> tuple[str, str]:
    """Returns the programs of aux and of main, each by itself."""
    nodes = [statement.node for code in (aux, main) for statement in code.module.statements]
    imports = "\n".join(dict.fromkeys(ast.unparse(node) for node in nodes if isinstance(node, IMPORTS)))
    return join_sources(imports, prefix, aux.source), join_sources(imports, prefix, main.source)

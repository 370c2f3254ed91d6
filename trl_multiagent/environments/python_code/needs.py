"""
Finds the top-level statements that a function needs: those that bind the names it reads, those that change the
objects of these names, and, in turn, the statements that these need.

A call such as `build()` is needed if it changes a variable that the function needs. Calls of the function itself
count as examples and are never needed.
"""

import ast
import bisect
from collections.abc import Iterable
from itertools import chain, islice

from trl_multiagent.environments.python_code.effects import (
    ASSIGNMENTS,
    Effects,
    assignments,
    call_arguments,
    read_effects,
    sources,
)
from trl_multiagent.environments.python_code.scopes import (
    BUILTINS,
    CONTAINERS,
    DEFINITIONS,
    END,
    IMPORTS,
    MUTATORS,
    Module,
    Roots,
    Statement,
    names_of,
    root_name,
)


FUTURE = "__future__"
SETTING = "setrecursionlimit"  # affects every function, although no function reads the name
MAX_ALIASES = 20  # at most this many names of one object are followed
SCRIPT_FUNCTIONS = {"print", "input", "help", "exit", "quit"}
# Library functions that start or end a script, or print
SCRIPT_METHODS = {"exit", "_exit", "abort", "main", "run", "testmod", "write", "writelines", "flush", "show"}


def kept_and_needed(module: Module, name: str) -> tuple[list[int], list[int]]:
    """
    Chooses the statements that belong in the program.

    Args:
        module (`Module`): A completion's code.
        name (`str`): The function that the agent was asked for.

    Returns:
        `tuple[list[int], list[int]]`: The indices of the statements to keep, and of those that the function needs. All
        definitions and imports are kept, with the statements that they need. A call is kept only if the function
        that was asked for needs it; a call such as `main()` may fill a variable that only `main` reads. Bindings that
        later ones replace are kept, but the function does not need them.
    """
    facts = _Facts(module, name)
    needed = _Needs(facts, only_last=True)
    needed.add_names([name, FUTURE, SETTING])
    kept = _Needs(facts, only_last=False)
    kept.add_names([name, FUTURE, SETTING])
    kept.calls_count = False
    for place, statement in enumerate(module.statements):
        if isinstance(statement.node, (*DEFINITIONS, *IMPORTS)):
            kept.add_statement(place)
            kept.add_names(statement.binds)
    return sorted(kept.places), sorted(needed.places)


class _Facts:
    """
    The names that the statements of a module bind, change and call.

    Args:
        module (`Module`): The module.
        name (`str`): The function whose calls are examples.

    Attributes:
        events (`dict[str, list[tuple[int, bool]]]`): For each name, the indices of the statements that bind it or
            change its object, and whether they always replace its earlier value.
        changed_by (`dict[str, list[str]]`): For each variable, the module's functions that change it.
        named_by (`dict[str, list[str]]`): For each function, the functions whose code contains its name.
        run_by (`dict[str, list[int]]`): For each name, the indices of the statements that read it when they run.
        called_by (`dict[str, list[int]]`): For each name, the indices of the statements that call it or one of its
            methods.
    """

    def __init__(self, module: Module, name: str):
        self.module = module
        self.name = name
        self.events: dict[str, list[tuple[int, bool]]] = {}
        self.changed_by: dict[str, list[str]] = {}
        self.named_by: dict[str, list[str]] = {}
        self.run_by: dict[str, list[int]] = {}
        self.called_by: dict[str, list[int]] = {}
        own = module.functions.keys() - {name}
        effects = read_effects(module) if any(statement.reads_now & own for statement in module.statements) else {}
        for function, its in effects.items():
            for variable in its.variables:
                self.changed_by.setdefault(variable, []).append(function)
            for called in its.calls:
                self.named_by.setdefault(called, []).append(function)
        aliases: dict[str, set[str]] = {}  # for each name, other names that may refer to the same object
        for place, statement in enumerate(module.statements):
            if _is_left_out(statement.node):
                continue
            for bound in statement.binds:
                self.events.setdefault(bound, []).append((place, statement.certain))
            for changed in _changed_names(module, effects, statement, name, aliases) - statement.binds:
                self.events.setdefault(changed, []).append((place, changed == SETTING))
            for read in statement.reads_now if effects else ():
                self.run_by.setdefault(read, []).append(place)
            for called in statement.calls if effects else ():
                self.called_by.setdefault(called, []).append(place)


class _Needs:
    """
    Collects the statements that names and other statements need.

    Args:
        facts (`_Facts`): The facts about the module.
        only_last (`bool`): Whether earlier bindings of a name that a later one replaces are left out. A binding that always
            happens replaces all earlier ones; one in a branch replaces those in other branches.

    Attributes:
        places (`set[int]`): The indices of the statements.
        calls_count (`bool`): Whether calls of the module's functions are collected for the variables that they change.
    """

    def __init__(self, facts: _Facts, only_last: bool):
        self.facts = facts
        self.only_last = only_last
        self.calls_count = True
        self.places: set[int] = set()
        self.seen: set[tuple[str, int]] = set()  # events that were looked at: name, position in its list
        self.active: set[str] = set()  # functions whose calls are needed, and objects that have such methods
        self.queue: list[int] = []  # statements whose own needs are still to be collected

    def add_names(self, names: Iterable[str]) -> None:
        """Adds the statements that determine the final values of names."""
        for name in names:
            self._need(name, END)
        self._work()

    def add_statement(self, place: int) -> None:
        """Adds a statement and what it needs."""
        self._take(place)
        self._work()

    def _take(self, place: int) -> None:
        if place not in self.places:
            self.places.add(place)
            self.queue.append(place)

    def _work(self) -> None:
        while self.queue:
            place = self.queue.pop()
            statement = self.facts.module.statements[place]
            for name in statement.reads_now:
                self._need(name, place)
            for name in statement.reads_later:
                self._need(name, END)

    def _need(self, name: str, before: int) -> None:
        if name not in self.facts.events and name not in BUILTINS and name != "*":
            self._need("*", before)  # it may come from `from module import *`
        events = self.facts.events.get(name, [])
        statements = self.facts.module.statements
        in_branch = False  # whether a later branch binds the name
        for k in range(bisect.bisect_left(events, (before,)) - 1, -1, -1):
            place, certain = events[k]
            if (name, k) in self.seen:
                break
            self.seen.add((name, k))
            if (
                self.only_last
                and isinstance(statements[place].node, (ast.If, ast.Try))
                and name in statements[place].binds
            ):
                if in_branch:
                    continue
                in_branch = True
            self._take(place)
            if certain and self.only_last:
                break
        if self.calls_count:
            for function in self.facts.changed_by.get(name, ()):
                self._activate(function)

    def _activate(self, function: str) -> None:
        """Adds the statements that call a function, directly, through other functions, or as a method of an object."""
        new = [function]
        while new:
            name = new.pop()
            if name == self.facts.name or name in self.active:
                continue
            self.active.add(name)
            module, facts = self.facts.module, self.facts
            for place in (facts.run_by if name in module.functions else facts.called_by).get(name, ()):
                statement = module.statements[place]
                if self.only_last and isinstance(statement.node, ast.Expr) and _is_script_call(statement.node.value):
                    continue  # `print(build())` is kept because of `build`, but it does not count as the function's text
                self._take(place)
                if not isinstance(statement.node, DEFINITIONS):
                    new += statement.binds
            new += facts.named_by.get(name, ())


def _is_left_out(node: ast.stmt) -> bool:
    """Whether a statement belongs to a script, even if it changes something."""
    if isinstance(node, ast.If):
        return any(isinstance(inner, ast.Name) and inner.id == "__name__" for inner in ast.walk(node.test))
    return isinstance(node, ast.Assert)


def _changed_names(
    module: Module, effects: dict[str, Effects], statement: Statement, own: str, aliases: dict[str, set[str]]
) -> set[str]:
    """
    The names of the module whose objects a statement may change when it runs. Variables that the module's functions change
    without being given them are left out. Names that the statement makes refer to the same object are recorded in `aliases`.
    """
    node = statement.node
    if isinstance(node, IMPORTS):
        for bound in statement.binds if len(statement.binds) <= MAX_ALIASES else ():
            aliases[bound] = (
                statement.binds
            )  # imported names may share state: `getcontext().prec = 5` affects `Decimal`
        return set()
    if isinstance(node, ast.Expr) and _is_script_call(node.value):
        return set()
    names: set[str] = set()
    roots: Roots = {}
    dropped: set[ast.AST] = set()  # calls whose value is not used

    def change(target: ast.AST) -> None:
        root = root_name(target, roots)
        if root is not None:
            names.add(root.id)

    if isinstance(node, DEFINITIONS):
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Name):
                change(decorator)  # `@dispatch.register(int)`
    nodes = [*chain(statement.nodes, *(scope.nodes for scope in statement.running))]
    for inner in nodes:
        if isinstance(inner, ast.Expr):
            dropped.add(inner.value)
        elif isinstance(inner, CONTAINERS):
            if not isinstance(inner.ctx, ast.Load):
                change(inner)
        elif isinstance(inner, ast.Call):
            root = root_name(inner.func, roots)
            if root is None:
                continue
            if isinstance(inner.func, ast.Attribute):
                function, is_library = inner.func.attr, root.id in module.imported
                if not is_library or (inner in dropped and function not in SCRIPT_METHODS):
                    names.add(root.id)
                changes_arguments = is_library and function in MUTATORS
            else:
                function = root.id
                changes_arguments = function in MUTATORS or (
                    function != own and function in effects and effects[function].arguments
                )
            if function == SETTING:
                names.add(SETTING)
            for argument in call_arguments(inner) if changes_arguments else ():
                change(argument)
    for inner in nodes:
        for target, value in assignments(inner) if isinstance(inner, ASSIGNMENTS) else ():
            for bound in names_of([target]):
                aliases.setdefault(bound, set()).update(islice(sources(value, roots), MAX_ALIASES))
    queue = [*names]
    for name in queue:
        if len(names) > MAX_ALIASES:
            break
        new = aliases.get(name, set()) - names
        names |= new
        queue += new
    return names


def _is_script_call(node: ast.AST) -> bool:
    """Whether an expression calls a function that only prints, reads input or ends the program."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SCRIPT_FUNCTIONS

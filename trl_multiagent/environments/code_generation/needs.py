"""
Which statements of a module a function needs: what binds the names that it reads, what changes their objects, and what these
statements need themselves.

A call of an own function is needed if it changes something that the function needs: `build()` that fills a sieve. Calls of the
function itself are examples, whatever they change.
"""

import ast
import bisect
from itertools import chain, islice

from .effects import ASSIGNMENTS, assignments, call_arguments, read_effects, sources
from .scopes import BUILTINS, CONTAINERS, DEFINITIONS, END, IMPORTS, MUTATORS, Module, Statement, names_of, root_name


FUTURE = "__future__"
SETTING = "setrecursionlimit"  # changes how every function runs, and no name that it reads
MAX_ALIASES = 20  # names that are followed from one
SCRIPT_FUNCTIONS = {"print", "input", "help", "exit", "quit"}
SCRIPT_METHODS = {
    *("exit", "_exit", "abort", "main", "run", "testmod", "write", "writelines", "flush", "show")
}  # of libraries


def kept_and_needed(module: Module, name: str) -> tuple[list[int], list[int]]:
    """
    The places of the statements that are no script, and of those that the function of a name needs.

    Of a script is what no definition needs. Calls of own functions do not count for a definition that the function of the name does
    without: `main()` fills what `main` reads. Bindings that are replaced by later ones are kept, but not needed.
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
    Where the statements of a module bind, change and run something.

    Args:
        module (`Module`): The module.
        name (`str`): The function whose calls are examples.

    Attributes:
        events (`dict[str, list[tuple[int, bool]]]`): By name, the places where it is bound or its object changed, and whether what
            was before is gone.
        changed_by (`dict[str, list[str]]`): By variable, the own functions that change it.
        named_by (`dict[str, list[str]]`): By own function, those that name it.
        run_by (`dict[str, list[int]]`): By name, the places of the statements that read it when they run.
        called_by (`dict[str, list[int]]`): By name, the places of those that call it, or a method of it.
    """

    def __init__(self, module: Module, name: str):
        self.module = module
        self.name = name
        self.events, self.changed_by, self.named_by, self.run_by, self.called_by = {}, {}, {}, {}, {}
        own = module.functions.keys() - {name}
        effects = read_effects(module) if any(statement.reads_now & own for statement in module.statements) else {}
        for function, its in effects.items():
            for variable in its.variables:
                self.changed_by.setdefault(variable, []).append(function)
            for called in its.calls:
                self.named_by.setdefault(called, []).append(function)
        aliases = {}  # names whose objects another name may stand for
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
    Collects statements.

    Args:
        facts (`_Facts`): What the module says.
        only_last (`bool`): Whether a binding that certainly happens makes those before it needless, and one in a branch those
            in branches before it.

    Attributes:
        places (`set[int]`): The statements.
        calls_count (`bool`): Whether calls of own functions are needed for what they change.
    """

    def __init__(self, facts: _Facts, only_last: bool):
        self.facts = facts
        self.only_last = only_last
        self.calls_count = True
        self.places = set()
        self.seen = set()  # the events that were looked at
        self.active = set()  # functions whose calls are needed, and objects with such methods
        self.queue = []  # needed statements whose own needs are not yet looked at

    def add_names(self, names) -> None:
        """Adds what the values of names at the end of the module need."""
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
            self._need("*", before)  # what `from module import *` brings
        events = self.facts.events.get(name, [])
        statements = self.facts.module.statements
        in_branch = False  # whether the name is bound in a branch further down
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
        """Adds the statements that run a function, straight or through others, or call a method of an object that runs it."""
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
                    continue  # `print(build())` is kept for what it changes, but is a print
                self._take(place)
                if not isinstance(statement.node, DEFINITIONS):
                    new += statement.binds
            new += facts.named_by.get(name, ())


def _is_left_out(node: ast.stmt) -> bool:
    """Whether a statement is a script's, whatever it changes."""
    if isinstance(node, ast.If):
        return any(isinstance(inner, ast.Name) and inner.id == "__name__" for inner in ast.walk(node.test))
    return isinstance(node, ast.Assert)


def _changed_names(module: Module, effects: dict, statement: Statement, own: str, aliases: dict) -> set[str]:
    """
    Names of a module whose objects a statement may change when it runs, other than by own functions that change variables of the
    module. Adds to `aliases` the names that the statement gives to objects which have names.
    """
    node = statement.node
    if isinstance(node, IMPORTS):
        for bound in statement.binds if len(statement.binds) <= MAX_ALIASES else ():
            aliases[bound] = statement.binds  # of one module: `getcontext().prec = 5` changes what `Decimal` does
        return set()
    if isinstance(node, ast.Expr) and _is_script_call(node.value):
        return set()
    names = set()
    roots = {}
    dropped = set()  # calls whose value nothing uses

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
    """Whether an expression only shows, asks or ends something."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SCRIPT_FUNCTIONS

"""
Counts the calls of a program's functions, and changes what they return where an experiment asks for it.

A watched function is not wrapped: a few expressions are added to its own body, so that decorators, attributes, stack traces and
the depth of recursion stay as they are. The added expressions refer to constants of the code object, so that no name of the
program tells whether an experiment is under way: the code is the same with and without one.
"""

import ast
import contextlib
import copy
import itertools
import os
import threading
import types
import warnings
from collections.abc import Iterator


# What an experiment does while it lasts. "constant", "another", "echo" and "nothing" change what callers of a watched function get:
# the first value that it returned to anyone; at about every other call another one of its values, or an altered value while it
# has no other; its first argument, and None, both without the function being run. "first" and "alone" change what the entry
# point returns: the first value that a watched function returned during the call, in the form of the entry point's own result;
# what the watched function returns for the entry point's arguments
EXPERIMENTS = ("constant", "another", "echo", "nothing", "first", "alone")
NOT_RUN = ("echo", "nothing")
MAX_VALUES = 8  # different values of one function that are remembered
_NO_VALUE = object()
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MAX_ITEMS = 10_000  # of an iterator that is remembered
MAX_WRAPPINGS = 4
_CONVERTED = (list, tuple, dict, str, int, float)  # what `list(...)` and the like make of a value
_CONTAINERS = (list, tuple, set, frozenset, dict)
_EMPTY = {str: "?", bytes: b"?", list: [0], tuple: (0,), set: {0}, frozenset: {0}, dict: {0: 0}}


class _Depth(threading.local):
    value = 0


class Watch:
    """What is known of one watched function, and what happens to it."""

    experiment = ""  # the one under way, for all functions

    def __init__(self):
        self.calls = 0
        self.depth = _Depth()  # calls of the function that are running; only the outermost one's value is changed
        self.told = -1  # number of values told in experiments, less one
        self.values = []
        self.first = _NO_VALUE  # told since the entry point was called

    # The added expressions

    def enter(self):
        """Whether the function's body should run."""
        self.calls += 1
        self.depth.value += 1
        return self.depth.value > 1 or Watch.experiment not in NOT_RUN

    def leave(self):
        self.depth.value -= 1

    def instead(self, *args):
        """What a function that is not run returns."""
        return args[0] if args and Watch.experiment == "echo" else None

    def start(self):
        """The same as `enter` for a generator, between whose values other code runs."""
        self.calls += 1
        if self.first is _NO_VALUE:
            self.first = []
        return Watch.experiment not in NOT_RUN

    def instead_of_values(self, *args):
        """What a generator that is not run yields."""
        with contextlib.suppress(TypeError):  # the argument is nothing to go through
            yield from self.instead(*args) or ()

    def produce(self, value):
        """What a generator's caller gets in place of one of its values."""
        values, told = self.first, self.tell(value)
        if Watch.experiment and type(values) is list:
            values.append(told)
        return told

    def tell(self, value):
        """What the caller gets in place of a value."""
        if not Watch.experiment or self.depth.value > 1:
            return value
        if isinstance(value, Iterator):
            return iter(self.tell(list(itertools.islice(value, MAX_ITEMS))))
        told = value
        self.told += 1
        if Watch.experiment == "constant" and self.values:
            told = _copied(self.values[0])
        elif Watch.experiment == "another" and self.told.bit_count() % 2 == 0:
            # not at every call, nor at every second one: exchanged throughout, values would be equal where they were before
            others = (other for other in reversed(self.values) if _differ(other, value))
            other = next(others, _NO_VALUE)
            told = altered(value) if other is _NO_VALUE else _copied(other)
        if len(self.values) < MAX_VALUES and all(_differ(known, value) for known in self.values):
            self.values.append(_copied(value))
        if self.first is _NO_VALUE:
            self.first = _copied(told)  # the caller may change it
        return told

    def each(self, values):
        """What a generator yields in place of the values of another one."""
        return map(self.produce, values) if Watch.experiment else values


class _Watched:
    """Stands for a function that has no body of its own to add to: an alias, a partial, an object with `__call__`."""

    def __init__(self, function, watch):
        self._function = function
        self._watch = watch

    def __call__(self, *args, **kwargs):
        run = self._watch.enter()
        try:
            return self._watch.tell(self._function(*args, **kwargs)) if run else self._watch.instead(*args)
        finally:
            self._watch.leave()

    def __getattr__(self, name):
        return getattr(self._function, name)


def watched_entry_point(entry, watches, namespace):
    """The entry point as the checks call it: an experiment may replace its result by what a watched function returns."""

    def call(*args, **kwargs):
        if Watch.experiment == "alone":
            value = namespace[next(iter(watches))](*args, **kwargs)
            if value is None and args:  # it may have worked in place
                value = args[0]
            return _listed(value)
        for watch in watches.values():
            watch.first = _NO_VALUE
        value = entry(*args, **kwargs)
        if Watch.experiment != "first":
            return value
        value = _listed(value)  # a generator calls the watched functions only now
        told = [watch.first for watch in watches.values() if watch.first is not _NO_VALUE]
        return _passed_on(told[0], value) if told else value

    return call


def _passed_on(told, value):
    """What was told, in the form in which another value is the same: `list(...)` around it or `[0]` after it is no work."""
    forms = [_listed(told)]
    for _ in range(MAX_WRAPPINGS):
        if (inside := _unwrapped(forms[-1])) is _NO_VALUE:
            break
        forms.append(_listed(inside))
    if type(value) in _CONVERTED:
        for form in tuple(forms):
            with contextlib.suppress(Exception):  # there is no such conversion
                forms.append(type(value)(form))
    return next((form for form in forms if not _differ(form, value)), forms[0])


def _unwrapped(value):
    """The only value that a container, an object or a function without arguments holds."""
    inside = _NO_VALUE
    if type(value) in _CONTAINERS and len(value) == 1:
        (inside,) = value.values() if type(value) is dict else value
    elif isinstance(getattr(value, "__dict__", None), dict) and len(vars(value)) == 1:
        (inside,) = vars(value).values()
    elif isinstance(value, types.FunctionType):
        with contextlib.suppress(Exception):  # it needs arguments
            inside = value()
    return inside


def _listed(value):
    return list(value) if isinstance(value, Iterator) else value


def altered(value):
    """Another value of the same type, if it is a plain one; else a bare object."""
    kind = type(value)
    if kind is bool:
        return not value
    if kind in (int, float):
        return -3 * value - 1  # another sign and parity, and not the old value again when altered twice
    if kind in _EMPTY:
        return kind() if value else kind(_EMPTY[kind])
    return object()


def _copied(value):
    if type(value) not in (*_CONTAINERS, bytearray):  # objects are told apart by what they are
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # an iterator, say, or an object of the program's that does not allow it
        return value


def _differ(one, other):
    try:
        return bool(one != other)
    except Exception:  # a comparison of the program's
        return one is not other


def compile_watched(source: str, names, filename: str):
    """
    Compiles a program with the added expressions.

    Returns:
        `tuple[types.CodeType, dict[str, Watch]]`: The module's code, and each watched name's record.
    """
    watches = {name: Watch() for name in names}
    adding = _AddWatches(watches)
    tree = ast.fix_missing_locations(adding.visit(ast.parse(source, filename)))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that a text is called, which a constant that is a function will have replaced
        code = compile(tree, filename, "exec", dont_inherit=True)
    return _with_constants(code, adding.constants), watches


def _with_constants(code, constants):
    """The code with other constants in place of some of its texts, that of its functions too."""
    values = (
        _with_constants(value, constants)
        if isinstance(value, types.CodeType)
        else constants.get(value, value)
        if type(value) is str
        else value
        for value in code.co_consts
    )
    return code.replace(co_consts=tuple(values))


class _AddWatches(ast.NodeTransformer):
    """Adds the expressions to the watched functions of a module; of other functions nothing is looked at."""

    def __init__(self, watches):
        self.watches = watches
        self.constants = {}  # by the text that stands for each until the code is compiled
        self.key = os.urandom(8).hex()  # so that no text of the program is one of these
        self.numbers = itertools.count()

    def constant(self, value):
        text = f"{self.key} {next(self.numbers)}"
        self.constants[text] = value
        return ast.Constant(text)

    def call(self, function, *args):
        return ast.Call(self.constant(function), list(args), [])

    def visit_ClassDef(self, node):
        return node

    visit_Lambda = visit_ClassDef

    def visit_FunctionDef(self, node):
        if node.name in self.watches:
            _watch_body(node, self.watches[node.name], self.call)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        names = [name for name in names if name in self.watches]
        if not names or node.value is None:
            return node
        if isinstance(node.value, ast.Lambda) and len(targets) == 1 and isinstance(targets[0], ast.Name):
            returned = ast.copy_location(ast.Return(node.value.body), node)
            # a lambda's arguments are taken over as they are; the new function is made in the same place
            function = ast.copy_location(ast.FunctionDef(names[0], node.value.args, [returned], [], None, None), node)
            function.type_params = []
            return self.visit_FunctionDef(function)
        replacements = [
            ast.Assign(
                [ast.Name(name, ast.Store())],
                self.call(_Watched, ast.Name(name, ast.Load()), self.constant(self.watches[name])),
            )
            for name in names
        ]
        return [node, *(ast.copy_location(replacement, node) for replacement in replacements)]

    visit_AnnAssign = visit_Assign


def _watch_body(function, watch, call):
    """Adds the expressions to a function's body; functions within it are left alone."""
    is_generator = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in _own_nodes(function))
    changed = _ReplaceValues(watch, call, is_generator)
    body = [changed.visit(statement) for statement in function.body]
    docstring = []
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and type(body[0].value.value) is str:
        docstring, body = body[:1], body[1:]
    enter = call(watch.start if is_generator else watch.enter)
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)][:1]
    first = [ast.Name(name, ast.Load()) for name in names]
    if not names and function.args.vararg:
        first = [ast.Starred(ast.Name(function.args.vararg.arg, ast.Load()), ast.Load())]
    if is_generator:
        values = call(watch.instead_of_values, *first)
        if isinstance(function, ast.AsyncFunctionDef):  # it cannot go through another one
            instead = [ast.Return(None)]
        else:
            instead = [ast.Expr(ast.YieldFrom(values)), ast.Return(None)]
    else:
        instead = [ast.Return(call(watch.instead, *first))]
    body = [ast.If(ast.UnaryOp(ast.Not(), enter), instead, []), *body]
    if not is_generator:
        body.append(ast.Return(call(watch.tell, ast.Constant(None))))
        body = [ast.Try(body, [], [], [ast.Expr(call(watch.leave))])]
    for node in body:
        ast.copy_location(node, function)
    function.body = docstring + body


def _own_nodes(function):
    """The nodes of a function's body, without those of functions and classes within it."""
    stack = [*function.body]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            stack += ast.iter_child_nodes(node)


class _ReplaceValues(ast.NodeTransformer):
    """Sends what a function returns or yields through its watch."""

    def __init__(self, watch, call, is_generator):
        self.watch = watch
        self.call = call
        self.is_generator = is_generator

    def _other_scope(self, node):
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _other_scope

    def visit_Return(self, node):
        self.generic_visit(node)
        if not self.is_generator:
            node.value = self.call(self.watch.tell, node.value or ast.Constant(None))
        return node

    def visit_Yield(self, node):
        self.generic_visit(node)
        node.value = self.call(self.watch.produce, node.value or ast.Constant(None))
        return node

    def visit_YieldFrom(self, node):
        self.generic_visit(node)
        node.value = self.call(self.watch.each, node.value)
        return node

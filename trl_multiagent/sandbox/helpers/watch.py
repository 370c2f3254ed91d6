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


# What an experiment does while it lasts. "constant", "another" and "nothing" change what callers of a watched function get:
# the first value that it returned to anyone; at about every other call another one of its values, or an altered value while it has
# no other; None, without the function being run. "last" and "alone" change what the entry point returns: the last value that a watched
# function returned during the call, in the type of the entry point's own result; what the watched function returns for the
# entry point's arguments
EXPERIMENTS = ("constant", "another", "nothing", "last", "alone")
MAX_VALUES = 8  # different values of one function that are remembered
_NO_VALUE = object()
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CONVERTED = (list, tuple, str, int, float)  # what `list(...)` and the like make of a value
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
        self.last = _NO_VALUE

    # The added expressions

    def enter(self):
        """Whether the function's body should run."""
        self.calls += 1
        self.depth.value += 1
        return self.depth.value > 1 or Watch.experiment != "nothing"

    def leave(self):
        self.depth.value -= 1

    def start(self):
        """The same as `enter` for a generator, between whose values other code runs."""
        self.calls += 1
        self.last = []
        return Watch.experiment != "nothing"

    def produce(self, value):
        """What a generator's caller gets in place of one of its values."""
        values, told = self.last, self.tell(value)
        if type(values) is list:
            values.append(told)
            self.last = values
        return told

    def tell(self, value):
        """What the caller gets in place of a value."""
        if not Watch.experiment or self.depth.value > 1:
            return value
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
        self.last = told
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
            return self._watch.tell(self._function(*args, **kwargs)) if run else None
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
            watch.last = _NO_VALUE
        value = entry(*args, **kwargs)
        if Watch.experiment != "last":
            return value
        value = _listed(value)  # a generator calls the watched functions only now
        told = [watch.last for watch in watches.values() if watch.last is not _NO_VALUE]
        return _passed_on(told[0], value) if told else value

    return call


def _passed_on(told, value):
    """What was told, in the form in which another value is the same: `list(...)` around it or `[0]` after it is no work."""
    told = _listed(told)
    forms = [told]
    if type(told) in (list, tuple, dict) and len(told) == 1:
        forms += told.values() if type(told) is dict else told
    for form in tuple(forms):
        if type(value) in _CONVERTED:
            with contextlib.suppress(Exception):  # there is no such conversion
                forms.append(type(value)(form))
    return next((form for form in forms if not _differ(form, value)), told)


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
    body = [ast.If(ast.UnaryOp(ast.Not(), enter), [ast.Return(None)], []), *body]
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

"""
Counts the calls of a program's functions, and changes what they return during an experiment.

A watched function is not wrapped. A few expressions are added to its own body instead, so that decorators, attributes, stack
traces and the depth of recursion stay as they are. The added expressions refer to constants of the code object and not to
names, and they are the same with and without an experiment, so that the program cannot tell whether one is under way.
"""

import ast
import contextlib
import copy
import decimal
import fractions
import io
import itertools
import os
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .data import ATOMS, CONTAINERS, DICTIONARIES, LIST_ITERATOR, bytes_of, is_data


# The docstring of `Program` says what each experiment changes
CONSTANT = ("constant", "second", "third")
NO_YIELD = ("echo", "mute", "nothing")  # the experiments in which a generator does not run, except once with `echo`
WITH_COPIES = ("apart", "echo", "control")  # those in which arguments are copied
MAX_VALUES = 8  # how many different values of one function are kept
_NO_VALUE = object()
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
PROGRAM = "<program>"  # the file name in the program's code objects
MAX_ITEMS = 10_000  # of an iterator whose items are kept
MAX_WRAPPINGS = 100  # containers around a value that are taken off
MAX_PARTS = 100  # of a value that may contain arguments
# What `list(...)` and the like make of a value
_CONVERTED = (list, tuple, dict, set, frozenset, str, int, float, bool, complex, fractions.Fraction, decimal.Decimal)
_EMPTY: dict[type, Any] = {str: "?", bytes: b"?", list: [0], tuple: (0,), set: {0}, frozenset: {0}, dict: {0: 0}}


class _Depth(threading.local):
    value = 0


class Watch:
    """Counts the calls of one watched function, keeps some of its values, and decides what its callers get."""

    experiment = ""  # the one under way, shared by all watched functions
    unfit = ""  # why, as the control found, experiments show nothing

    def __init__(self) -> None:
        self.calls = 0
        self.depth = _Depth()  # number of nested calls; only the value of the outermost call is changed
        self.last_index = -1  # index of the last value that was given out in experiments
        self.values: list[Any] = []
        self.first: Any = _NO_VALUE  # the first value given out since the entry point was called
        # The arguments of the outermost call, and after them those of the one before, each with what the function got for it
        self.arguments: dict[tuple[bool, int], tuple[Any, Any]] = {}
        self.template: _Template | None = None  # of the function's values
        # By the generator that ran last with `echo` or the control, from these arguments
        self.yielded: list[Any] | None = None
        self.called_with: bytes | None = None  # the arguments of the outermost call
        self.results: dict[bytes, bytes] = {}  # values by arguments
        self.entries = 0  # calls of the entry point
        self.given_out = 0  # values since the last one of these
        self.replayed: list[Any] = []  # the values during the first one

    # The added expressions call these methods

    def enter(self) -> bool:
        """Counts a call. Returns whether the function's body should run."""
        self.calls += 1
        self.depth.value += 1
        return self.depth.value > 1 or Watch.experiment != "nothing"

    def given(self, *parameters: Any) -> tuple:
        """
        Returns what the function gets for its arguments: `parameters` are a tuple of single ones, the tuple of the further positional ones and
        the dictionary of the further named ones, as far as there are any.
        """
        if self.depth.value > 1 or not Watch.experiment:
            return parameters
        parameters = tuple(_with_lists(some) for some in parameters)  # code must not run while an iterator is read
        if Watch.experiment not in WITH_COPIES:
            return parameters
        if all(type(one) in ATOMS for one in parameters[0]) and not any(parameters[1:]):
            copies = parameters  # most arguments, and this is faster
        else:
            self.check(parameters)
            copies = _copied(parameters)
        if Watch.experiment == "control":
            self.called_with = bytes_of(parameters)
        self.remember(_single(*parameters), _single(*copies))
        return parameters if Watch.experiment == "control" else copies

    def remember(self, old: list, new: list) -> None:
        """Keeps the arguments of a call, as they were and as the function got them."""
        before = {(True, k): both for (is_before, k), both in self.arguments.items() if not is_before}
        self.arguments = {(False, k): both for k, both in enumerate(zip(old, new, strict=True))} | before

    def check(self, value: Any) -> None:
        """During the control, looks for code and objects with code in what passes between the agents."""
        if Watch.experiment == "control" and not is_data(value):
            Watch.unfit = "something other than data passed between the agents"

    def compare(self, value: Any) -> None:
        """During the control, looks for two values for the same arguments, which only a function that keeps a state has."""
        if Watch.experiment != "control" or self.called_with is None or len(self.results) > MAX_ITEMS:
            return
        result = bytes_of(value)  # a state may also be in the types or the order of equal values
        if result is not None and result != self.results.setdefault(self.called_with, result):
            Watch.unfit = "the function keeps a state"

    def leave(self) -> None:
        self.depth.value -= 1
        if Watch.experiment == "control" and self.depth.value == 0:  # the function may have changed them
            self.check([old for place, (old, _) in self.arguments.items() if not place[0] and old is not _NO_VALUE])

    def raises(self) -> bool:
        """Returns whether the caller gets the exception that the function raised."""
        return self.depth.value > 1 or Watch.experiment != "echo"

    def filled(self) -> Any:
        """Returns the known template with the present arguments; the first of them if there is no template that fits, None if there are none."""
        arguments = {place: argument for place, (argument, _) in self.arguments.items()}
        with contextlib.suppress(Exception):  # an argument of the template is missing
            if self.template:
                return self.template.filled(arguments)
        first = arguments.get((False, 0))
        return None if first is _NO_VALUE else first

    def learn(self, value: Any) -> None:
        """Keeps the first value that contains arguments as a template. Where several arguments fit, later values decide."""
        if type(value) in ATOMS and all(_differ(value, old) for old, _ in self.arguments.values()):
            return  # most values, and this is faster
        with contextlib.suppress(Exception):  # the value is none; see `_Template`
            # A constant beside an argument of this call, such as True, may equal one of the call before
            template = _Template(value, {place: both for place, both in self.arguments.items() if not place[0]})
            template = template if template.places else _Template(value, self.arguments)
            places = template.places
            if places and (self.template is None or len(places) < len(self.template.places)):
                self.template = template
            elif self.template and len(places) == len(self.template.places):
                common = [one & other for one, other in zip(places, self.template.places, strict=True)]
                self.template.places = common if all(common) else self.template.places

    def start(self, *parameters: Any) -> bool:
        """Does what `enter` and `given` do, for a generator. Other code runs between its values, so it has no depth."""
        self.calls += 1
        if Watch.experiment and _runs_for_itself():
            return True
        if self.first is _NO_VALUE:
            self.first = []
        runs = Watch.experiment not in NO_YIELD or (Watch.experiment == "echo" and self.calls == 1)
        if Watch.experiment in WITH_COPIES:
            if self.yielded is not None:
                self.learn(self.yielded)
            self.yielded = [] if runs else None
            self.check(parameters)
            self.remember(*[_single(*parameters)] * 2)
        return runs

    def instead_of_values(self) -> Iterator:
        """Yields the values of a generator that is not run."""
        with contextlib.suppress(TypeError):  # the argument is not iterable
            yield from self.filled() or () if Watch.experiment == "echo" else ()

    def produce(self, value: Any) -> Any:
        """Returns what a generator's caller gets in place of one of its values."""
        if not Watch.experiment or _runs_for_itself():
            return value
        value = iter([*itertools.islice(value, MAX_ITEMS)]) if isinstance(value, Iterator) else value
        values, arguments, self.arguments = self.first, self.arguments, {}
        # with `echo`, a generator runs once, to make a template of its values
        result = value if Watch.experiment == "echo" else self.give(value)
        self.arguments = arguments
        if self.yielded is not None and len(self.yielded) < MAX_PARTS:
            self.yielded.append(_copied(value))
        if type(values) is list:
            values.append(_copied(result))
        return result

    def give(self, value: Any) -> Any:
        """Returns what the caller gets in place of a value."""
        if not Watch.experiment or self.depth.value > 1:
            return value
        if isinstance(value, Iterator):
            return iter(self.give(list(itertools.islice(value, MAX_ITEMS))))
        self.check(value)
        self.compare(value)
        # A program may notice the copies and comparisons, so they are the same in all experiments
        self.last_index += 1
        others = [known for known in self.values if _differ(known, value)]
        if len(others) == len(self.values) < MAX_VALUES:
            self.values.append(_copied(value))
        if Watch.experiment in WITH_COPIES:
            self.learn(value)
        self.given_out += 1
        if self.entries == 1 and Watch.experiment in ("replay", "control"):
            self.replayed.append(_copied(value))
        result = value
        if Watch.experiment in CONSTANT:
            rank = CONSTANT.index(Watch.experiment)
            result = self.values[rank] if len(self.values) > rank else None
        elif Watch.experiment == "echo":
            result = self.filled()
        elif Watch.experiment == "replay" and self.entries > 1:
            result = self.replayed[self.given_out - 1] if self.given_out <= len(self.replayed) else None
        elif Watch.experiment == ("another", "swapped")[self.last_index.bit_count() % 2]:
            # Neither at every call nor at every second one, because values that are exchanged regularly would stay equal wherever
            # they were equal before
            result = others[-1] if others else _altered(value)
        elif Watch.experiment == "mute":
            result = None
        result = _copied(result)
        if self.first is _NO_VALUE:
            self.first = _copied(result)  # because the caller may change the value
        return result

    def each(self, values: Iterable) -> Iterable:
        """Returns what a generator yields in place of the values of another one."""
        return map(self.produce, values) if Watch.experiment else values


class _Watched:
    """Replaces a function that has no body to add to: an alias, a partial, an object with `__call__`."""

    def __init__(self, function: Callable, watch: Watch):
        self._function = function
        self._watch = watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._watch.enter()
        try:
            _, args, kwargs = self._watch.given((), args, kwargs)
            return self._watch.give(self._function(*args, **kwargs)) if run else None
        except Exception:
            if self._watch.raises():
                raise
            return self._watch.filled()
        finally:
            self._watch.leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def watched_entry_point(entry: Callable, watches: dict[str, Watch], namespace: dict) -> Callable:
    """Returns the entry point as the checks call it. An experiment may replace its result by a watched function's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if Watch.experiment == "alone":
            value = namespace[next(iter(watches))](*args, **kwargs)
            if value is None and args:  # the function may have changed its argument in place
                value = args[0]
            return _listed(value)
        for watch in watches.values():
            watch.first, watch.given_out = _NO_VALUE, 0
            watch.entries += 1
        value = entry(*args, **kwargs)
        if Watch.unfit:
            raise TypeError(Watch.unfit)
        if Watch.experiment not in ("first", "control"):
            return value
        value = _listed(value)  # a generator calls the watched functions only when it is read
        first = [watch.first for watch in watches.values() if watch.first is not _NO_VALUE]
        instead = _in_form_of(value, first[0]) if first else value
        return instead if Watch.experiment == "first" else value

    return call


def _with_lists(arguments: tuple | dict) -> tuple | dict:
    """Arguments of a call, of which generators and other iterators are read."""
    if isinstance(arguments, dict):
        return dict(zip(arguments, _with_lists(tuple(arguments.values())), strict=True))
    return tuple(iter([*itertools.islice(one, MAX_ITEMS)]) if isinstance(one, Iterator) else one for one in arguments)


def _single(named: tuple, *rest: tuple | dict) -> list:
    """
    Returns all arguments of a call, each with what it contains if that is a single value, and with the tuple of a list or the list of a tuple. The
    first argument, if there is one, is the first, then come the tuple and the dictionary of further arguments, what is in them, and the tuple of all.
    """
    further = [one for some in rest for one in (some.values() if type(some) is dict else some)]
    single = [*(named or further[:1] or [_NO_VALUE]), *rest, *further, (*named, *further)]
    other: dict[type, Callable] = {list: tuple, tuple: list, LIST_ITERATOR: lambda one: [*copy.copy(one)]}
    return [x for one in single for x in (one, _unwrapped(one), other.get(type(one), lambda _: _NO_VALUE)(one))]


class _Template(pickle.Pickler):
    """A value of a function with places for its arguments. Raises for values that cannot be pickled, or have too many parts."""

    def __init__(self, value: Any, arguments: dict[tuple[bool, int], tuple[Any, Any]]):
        self.file = io.BytesIO()
        super().__init__(self.file)
        self.arguments = arguments
        self.places: list[set[tuple[bool, int]]] = []  # the arguments that fit, in the order of the value's parts
        self.parts = 0
        self.dump(value)

    def persistent_id(self, part: Any) -> int | None:
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise ValueError("no template")
        equal = {k for k, (old, new) in self.arguments.items() if part is new or not _differ(part, old)}
        self.places += [equal] if equal else []
        return len(self.places) - 1 if equal else None

    def filled(self, arguments: dict[tuple[bool, int], Any]) -> Any:
        """Returns the value with other arguments."""
        reading = pickle.Unpickler(io.BytesIO(self.file.getvalue()))

        def load(place: int) -> Any:
            if (argument := arguments[min(self.places[place])]) is _NO_VALUE:
                raise IndexError("no such argument")
            return argument

        reading.persistent_load = load  # type: ignore[method-assign]
        return reading.load()


def _in_form_of(value: Any, first: Any) -> Any:
    """
    Returns the watched function's first value, in the form that equals the entry point's `value` if there is one: converted, or taken out of a
    container. An entry point that only does this has not done any work.
    """
    forms = [_listed(first)]
    for _ in range(MAX_WRAPPINGS):
        if (inside := _unwrapped(forms[-1])) is _NO_VALUE:
            break
        forms.append(_listed(inside))
    # A fraction or a counter equals what `float` or `dict` makes
    kinds = (float, dict, type(value)) if type(value) in _CONVERTED else (float, dict)
    for form, kind in itertools.product(tuple(forms), kinds):
        with contextlib.suppress(Exception):  # there is no such conversion
            forms.append(kind(form))
    return next((form for form in forms if not _differ(form, value)), forms[0])


def _unwrapped(value: Any) -> Any:
    """Returns the only value in a container, or that a list iterator has left."""
    value = list(copy.copy(value)) if type(value) is LIST_ITERATOR else value
    if type(value) in CONTAINERS and len(value) == 1:
        return next(iter(value.values() if type(value) in DICTIONARIES else value))
    return _NO_VALUE


def _runs_for_itself() -> bool:
    """Returns whether the generator that calls the watch is run by a call of the same function, as in a recursion."""
    generator = sys._getframe(2)
    frame = generator.f_back
    while frame and frame.f_code is not generator.f_code:
        frame = frame.f_back
    return frame is not None


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else value


def _altered(value: Any) -> Any:
    """Returns a different value of the same type. For types that are not built in, a new object."""
    kind = type(value)
    if kind is bool:
        return not value
    if kind in (int, float):
        return -3 * value - 1  # changes sign and parity; applied twice, it does not give the old value
    if kind in _EMPTY:
        return kind() if value else kind(_EMPTY[kind])
    return object()


def _copied(value: Any) -> Any:
    if type(value) not in (*CONTAINERS, bytearray, LIST_ITERATOR):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # it holds something that cannot be copied, such as an iterator
        return value


def _differ(one: Any, other: Any) -> bool:
    try:
        return bool(one != other)
    except Exception:  # raised by a comparison that the program defines
        return one is not other


def compile_watched(source: str, names: Sequence[str], filename: str) -> tuple[types.CodeType, dict[str, Watch]]:
    """
    Compiles a program with the added expressions.

    Returns:
        `tuple[types.CodeType, dict[str, Watch]]`: The module's code, and each watched name's record.
    """
    watches = {name: Watch() for name in names}
    adding = _AddWatches(watches)
    tree = ast.fix_missing_locations(adding.visit(ast.parse(source, filename)))
    with warnings.catch_warnings():
        # The compiler would warn that strings are called: `_with_constants` replaces them by functions
        warnings.simplefilter("ignore")
        code = compile(tree, filename, "exec", dont_inherit=True)
    return _with_constants(code, adding.constants), watches


def _with_constants(code: types.CodeType, constants: dict[str, Any]) -> types.CodeType:
    """Returns the code, and that of its functions, with other constants in place of some of its strings."""
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
    """Adds the expressions to the watched functions of a module. It does not look into other functions."""

    def __init__(self, watches: dict[str, Watch]):
        self.watches = watches
        self.constants: dict[str, Any] = {}  # by the string that takes the place of each until the code is compiled
        self.key = os.urandom(8).hex()  # part of these strings, so that the program contains none of them
        self.numbers = itertools.count()

    def constant(self, value: Any) -> ast.Constant:
        text = f"{self.key} {next(self.numbers)}"
        self.constants[text] = value
        return ast.Constant(text)

    def call(self, function: Callable, *args: ast.expr) -> ast.Call:
        return ast.Call(self.constant(function), list(args), [])

    def visit_ClassDef(self, node: Any) -> ast.AST:
        return node

    visit_Lambda = visit_ClassDef

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        if node.name in self.watches:
            _watch_body(node, self.watches[node.name], self.call, self.constant(Exception))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: Any) -> ast.AST | list[ast.AST]:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        bound = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        # `aux.memo = {}` reads the name `aux`, and does not bind it
        names = [node.id for node in bound if node.id in self.watches and isinstance(node.ctx, ast.Store)]
        if not names or node.value is None:
            return node
        if isinstance(node.value, ast.Lambda) and len(targets) == 1 and isinstance(targets[0], ast.Name):
            returned = ast.copy_location(ast.Return(node.value.body), node)
            # a function with the lambda's arguments, defined in the same place
            function = ast.copy_location(ast.FunctionDef(names[0], node.value.args, [returned], [], None, None), node)
            vars(function)["type_params"] = []  # since Python 3.12
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


def _watch_body(function: _Function, watch: Watch, call: Callable[..., ast.Call], exception: ast.expr) -> None:
    """Adds the expressions to a function's body, but not to functions within it."""
    is_generator = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in _own_nodes(function))
    changed = _ReplaceValues(watch, call, is_generator)
    body = [changed.visit(statement) for statement in function.body]
    docstring = []
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and type(body[0].value.value) is str:
        docstring, body = body[:1], body[1:]
    read, written = _parameters(function.args)
    enter = call(watch.start, *read) if is_generator else call(watch.enter)
    instead: list[ast.stmt] = [ast.Return(ast.Constant(None))]
    if is_generator:
        values = call(watch.instead_of_values)
        if isinstance(function, ast.AsyncFunctionDef):  # an asynchronous generator cannot contain `yield from`
            instead = [ast.Return(None)]
        else:
            instead = [ast.Expr(ast.YieldFrom(values)), ast.Return(None)]
    begin: list[ast.stmt] = [ast.If(ast.UnaryOp(ast.Not(), enter), instead, [])]
    if is_generator:
        body = begin + body
    else:
        # `(a, b), args = given((a, b), args)`
        begin.append(ast.Assign([ast.Tuple(written, ast.Store())], call(watch.given, *read)))
        raised = [ast.If(call(watch.raises), [ast.Raise()], []), ast.Return(call(watch.filled))]
        handler = ast.ExceptHandler(exception, None, raised)
        body = [*begin, *body, ast.Return(call(watch.give, ast.Constant(None)))]
        body = [ast.Try(body, [handler], [], [ast.Expr(call(watch.leave))])]
    for node in body:
        ast.copy_location(node, function)
    function.body = docstring + body


def _parameters(arguments: ast.arguments) -> tuple[list[ast.expr], list[ast.expr]]:
    """Returns the expressions that read a function's parameters, as `Watch.given` takes them, and those that assign to them."""
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    rest = [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument]
    read, written = (
        [ast.Tuple([ast.Name(name, kind()) for name in named], kind()), *(ast.Name(name, kind()) for name in rest)]
        for kind in (ast.Load, ast.Store)
    )
    return read, written


def _own_nodes(function: _Function) -> Iterator[ast.AST]:
    """Yields the nodes of a function's body, without those of functions and classes within it."""
    stack: list[ast.AST] = [*function.body]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            stack += ast.iter_child_nodes(node)


class _ReplaceValues(ast.NodeTransformer):
    """Passes what a function returns or yields to its watch, and returns or yields what that gives."""

    def __init__(self, watch: Watch, call: Callable[..., ast.Call], is_generator: bool):
        self.watch = watch
        self.call = call
        self.is_generator = is_generator

    def _other_scope(self, node: ast.AST) -> ast.AST:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _other_scope

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if not self.is_generator:
            node.value = self.call(self.watch.give, node.value or ast.Constant(None))
        return node

    def visit_Yield(self, node: ast.Yield) -> ast.AST:
        self.generic_visit(node)
        node.value = self.call(self.watch.produce, node.value or ast.Constant(None))
        return node

    def visit_YieldFrom(self, node: ast.YieldFrom) -> ast.AST:
        self.generic_visit(node)
        node.value = self.call(self.watch.each, node.value)
        return node

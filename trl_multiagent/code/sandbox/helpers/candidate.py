"""
The process of one program. The program can change everything below, and the verifier does not trust it: whatever is
sent is read as plain data.

Messages on the socket, in order: the program (read), the outcome of its definitions, then one answer per call. Notes
about suspicious acts come in between, for the records only.
"""

import ast
import builtins
import gc
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import wire
from .unittests import OPERATIONS
from .wire import References, encode_call, pack


PROGRAM = "<program>"  # the file name in the program's code objects
MAX_ITEMS = 10_000  # of an iterator that a helper returns
OWN_FRAMES = 16  # stack frames of the helpers, which are added to the program's recursion limit
# Audit events that no answer to a coding task needs. A name that ends in a dot stands for all events that begin with
# it
_SUSPICIOUS = tuple(
    """
open os. subprocess. socket.connect socket.bind socket.sendto ctypes. shutil. code.__new__ resource. gc.get_ fcntl.
mmap. pty. signal.pthread_kill sys._current_frames sys.settrace sys.setprofile
""".split()
)
_IN_FOLDER = ("open", "shutil.", "os.listdir", "os.mkdir", "os.re", "os.rmdir", "os.scandir", "os.utime", "os.walk")
_fd = 0  # the socket, which is the only open file besides /dev/null on 0, 1 and 2
_inbox = wire.Inbox(wire.MAX_JOB)
_references: References  # what the checks use by number; 0 is the entry point
_counted: "dict[str, Calls]" = {}  # by the name of the watched function
_calling_checks = threading.RLock()  # one thread of the program at a time
_ordinary: tuple[str, ...] = ()  # acts that are not suspicious after all
_noted: Any = None  # set of the suspicious acts reported so far; None before a program runs


class Calls:
    """The number of calls of one function."""

    def __init__(self) -> None:
        self.number = 0

    def count(self) -> None:
        """Counts a call."""
        self.number += 1


def compile_counted(source: str, names: Sequence[str]) -> types.CodeType:
    """
    Compiles a program in which the calls of some top-level functions are counted, in `_counted`.

    A counted function is not wrapped. An expression is added to its own body instead, so that decorators, attributes,
    signatures, stack traces and the depth of recursion stay as they are. It calls a builtin, so that the program's
    module has no other names than before.
    """
    key = f"_{os.urandom(8).hex()}"  # no program contains it
    _counted.update({name: Calls() for name in names})
    vars(builtins).update({key + name: calls.count for name, calls in _counted.items()})
    stack: list[ast.AST] = [tree := ast.parse(source, PROGRAM)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name in _counted:
                count = ast.Expr(ast.Call(ast.Name(key + node.name, ast.Load()), [], []))
                has_docstring = ast.get_docstring(node, clean=False) is not None
                node.body.insert(has_docstring, ast.copy_location(count, node))
        elif not isinstance(node, ast.ClassDef | ast.Lambda):
            stack += ast.iter_child_nodes(node)
    return compile(ast.fix_missing_locations(tree), PROGRAM, "exec", dont_inherit=True)


def report_suspicious_acts() -> None:
    """Installs an audit hook that notes suspicious acts. It prevents none of them."""

    def hook(event: str, args: tuple) -> None:
        if _noted is None:
            return
        own_frame = event == "sys._getframe" and args and args[0].f_code.co_filename in (__file__, wire.__file__)
        traceback = event == "open" and str(args[0]).endswith(".py")  # a traceback looks for its source
        if own_frame or (event.startswith(_SUSPICIOUS) and not traceback and not event.startswith(_ordinary)):
            _note(event)

    sys.addaudithook(hook)


def _note(act: str) -> None:
    if act not in _noted and len(_noted) < 8:
        _noted.add(act)
        _write(pack({"suspicious": act}))


def serve(fd: int) -> None:
    """Runs the program's module code and answers calls until the socket closes."""
    global _fd, _noted, _ordinary, _references
    _fd = fd
    program = _inbox.read(_fd)
    _references = References(_proxy, program["unittest"] or program["is_helper"])
    _ordinary = _IN_FOLDER if program["folder"] else ()
    module = sys.modules["solution"] = types.ModuleType("solution")
    try:
        if program["watch"]:
            code = compile_counted(program["source"], program["watch"])
        else:
            code = compile(program["source"], PROGRAM, "exec", dont_inherit=True)
        if program["called"]:  # a function of another process
            vars(module)[program["called"]] = _references.stand_in(0, True)
        _noted = set()
        sys.setrecursionlimit(sys.getrecursionlimit() + OWN_FRAMES)
        gc.enable()
        exec(code, vars(module))
        entry = vars(module).get(program["entry_point"])
        if not callable(entry):
            raise NameError(f"the program does not define {program['entry_point']!r}")
    except BaseException as error:
        _write(pack({"raised": wire.describe(error)}))
        return
    _references.number(_with_short_iterators(entry) if program["is_helper"] else entry)
    if program["unittest"]:
        for operation in OPERATIONS:
            _references.number(operation)
    _write(pack({"defined": _calls()}))
    while True:
        _write(_answer(_inbox.read(_fd)))


def _calls() -> list[int]:
    return [calls.number for calls in _counted.values()]


def _with_short_iterators(function: Callable) -> Callable:
    """Returns the function with iterators that end, because they are read at once."""

    def call(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        return iter([*itertools.islice(value, MAX_ITEMS)]) if isinstance(value, Iterator) else value

    return call


def _calls_since(before: list[int]) -> list[int]:
    return [after - calls for after, calls in zip(_calls(), before, strict=True)]


def _answer(question: dict) -> bytes:
    """Returns the packed answer to one call: its value and what it changed in its arguments, or what it raised."""
    before = _calls()
    try:
        answer = wire.answer_call(question, _references)
        packed = pack(answer | {"id": question["id"], "calls": _calls_since(before)})
        if len(packed) > wire.MAX_ANSWER:
            raise RuntimeError(f"the answer has {len(packed)} bytes, the limit is {wire.MAX_ANSWER}")
        return packed
    except BaseException as error:
        return pack({"id": question["id"], "raised": wire.describe(error), "calls": _calls_since(before)})


def _proxy(references: References, number: int, is_function: bool) -> Callable:
    """
    Returns a function of the checks. A call of it asks the verifier, which may call the program before it answers.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with _calling_checks:
            _write(pack(encode_call(number, args, kwargs, _references)))
            while "call" in (message := _inbox.read(_fd)):
                _write(_answer(message))
        return wire.accept(message, args, kwargs, _references)

    return call


def _write(packed: bytes) -> None:
    while packed:
        packed = packed[os.write(_fd, packed) :]

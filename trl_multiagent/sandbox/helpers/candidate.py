"""
The process of one program. Everything below may be subverted by it: all it can do is answer calls with plain data.

Messages on the socket, in order: hello (written before any untrusted byte is read), the program (read), the outcome of its
definitions, then one answer per question. Notes about suspicious acts come in between; they are for the records only.
"""

import ast
import copy
import os
import random
import sys
import types

from .wire import MAX_FRAME, MAX_JOB, Encoder, Inbox, Unsendable, decode, pack


FD = 3  # the candidate's only open file besides /dev/null on 0, 1 and 2
MAX_TEXT = 300  # characters of an exception's message

# Audit events that no answer to a coding task needs; a final dot stands for the whole family
_SUSPICIOUS = tuple(
    """
    open os. subprocess. socket.connect socket.bind socket.sendto ctypes. shutil. code.__new__ resource. gc.get_ fcntl. mmap.
    pty. signal.pthread_kill sys._current_frames sys.settrace sys.setprofile
    """.split()
)
_noted = None  # names of the suspicious acts reported so far; None before a program runs


def watch_acts():
    """Installs the hook that notes suspicious acts. It protects nothing."""

    def hook(event, args):
        if _noted is None:
            return
        if event.startswith(_SUSPICIOUS):
            if not (event == "open" and str(args[0]).endswith(".py")):  # tracebacks look for their source
                _note(event)
        elif event == "sys._getframe" and args and args[0].f_code.co_filename == __file__:
            _note(event)
        elif event == "import" and args[0] in ("multiprocessing", "trl_multiagent"):
            _note(f"import {args[0]}")

    sys.addaudithook(hook)


def _note(act):
    if act not in _noted and len(_noted) < 8:
        _noted.add(act)
        _write(pack({"suspicious": act}))


def serve():
    """Says hello, runs the program's module code and answers calls until the socket closes."""
    global _noted
    _write(pack({"hello": True}))
    inbox = Inbox(MAX_JOB)
    program = _read(inbox)
    calls = dict.fromkeys(program["watch"], 0)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    pristine = _trusted()
    _noted = set()
    try:
        code = _compile(program["source"], calls, program["stub"], vars(module))
        exec(code, vars(module))
        entry = vars(module).get(program["entry_point"])
        if not callable(entry):
            raise NameError(f"the program does not define {program['entry_point']!r}")
    except BaseException as error:
        _write(pack({"raised": _describe(error)}))
        return
    _write(pack({"defined": True}))
    functions = [entry]
    while True:
        frame = _answer(_read(inbox), functions, inbox, calls)
        if _trusted() != pristine:
            _note("replaced a function")
        _write(frame)


def _trusted():
    # a few functions that a forger would replace; comparing all of them would copy their memory in every candidate
    return abs, all, any, isinstance, len, sorted, sum, eval, exec, copy.deepcopy, random.Random, random.randint


def _compile(source, calls, stub, namespace):
    """Compiles the program; the functions it is watched for count their calls."""
    if not calls:
        return compile(source, "<program>", "exec", dont_inherit=True)
    tree = ast.parse(source, "<program>")
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in calls:
            watch = ast.Call(ast.Name("__watch__", ast.Load()), [ast.Constant(node.name)], [])
            node.decorator_list.insert(0, watch)
            ast.fix_missing_locations(ast.copy_location(watch, node))
    depth = 0

    def watched(name):
        def decorate(function):
            def call(*args, **kwargs):
                nonlocal depth
                calls[name] += 1
                depth += 1
                try:
                    value = function(*args, **kwargs)
                finally:
                    depth -= 1
                return object() if name == stub and depth == 0 else value

            return call

        return decorate

    namespace["__watch__"] = watched
    return compile(tree, "<program>", "exec", dont_inherit=True)


def _answer(question, functions, inbox, calls):
    """The frame that answers one call: its value and what it changed in its arguments, or what it raised."""
    number = question["id"]
    try:
        before = dict(calls)

        def stand_in(index):
            return lambda *args, **kwargs: _call_back(index, args, kwargs, inbox)

        args = [decode(value, stand_in) for value in question["args"]]
        kwargs = {name: decode(value, stand_in) for name, value in question["kwargs"].items()}
        result = functions[question["function"]](*args, **kwargs)
        answer = {"id": number, "value": Encoder(functions, _note).encode(result)}
        changed = {}
        for index, value in enumerate(args):
            if type(value) in (list, dict, set, bytearray):
                after = Encoder(functions).encode(value)
                if after != question["args"][index]:
                    changed[index] = after
        if changed:
            answer["changed"] = changed
        if calls:
            answer["calls"] = [calls[name] - before[name] for name in calls]
        frame = pack(answer)
        if len(frame) > MAX_FRAME:
            raise Unsendable(f"the answer has {len(frame)} bytes, the limit is {MAX_FRAME}")
        return frame
    except BaseException as error:
        return pack({"id": number, "raised": _describe(error)})


def _call_back(index, args, kwargs, inbox):
    """Calls a function that the checks passed as an argument."""
    encode = Encoder([]).encode
    arguments = {"args": [encode(value) for value in args], "kwargs": {name: encode(v) for name, v in kwargs.items()}}
    _write(pack({"call_back": index, **arguments}))
    answer = _read(inbox)
    if "raised" in answer:
        raise RuntimeError(answer["raised"])
    return decode(answer["value"], None)


def _describe(error):
    """Type and message of an exception, whatever its methods do."""
    try:
        return [type(error).__name__[:80], str(error)[:MAX_TEXT]]
    except BaseException as failure:
        if not isinstance(failure, Exception):
            _note("tried to exit")
        return [type(error).__name__[:80], ""]


def _read(inbox):
    while (message := inbox.next()) is None:
        chunk = os.read(FD, 1 << 16)
        if not chunk:
            os._exit(0)
        inbox.data += chunk
    return message


def _write(frame):
    while frame:
        frame = frame[os.write(FD, frame) :]

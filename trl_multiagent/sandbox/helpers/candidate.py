"""
The process of one program. Everything below may be subverted by it: all it can do is answer calls with plain data.

Messages on the socket, in order: the program (read), the outcome of its definitions, then one answer per call. Notes about
suspicious acts come in between; they are for the records only.
"""

import copy
import gc
import os
import random
import sys
import threading
import types

from . import wire
from .watch import Watch, compile_watched, watched_entry_point
from .wire import decode_call, encode_call, pack


OWN_FRAMES = 15  # of this module and the zygote's, which the program's recursion does not pay for
# Audit events that no answer to a coding task needs; a final dot stands for the whole family
_SUSPICIOUS = tuple(
    """
open os. subprocess. socket.connect socket.bind socket.sendto ctypes. shutil. code.__new__ resource. gc.get_ fcntl. mmap. pty.
signal.pthread_kill sys._current_frames sys.settrace sys.setprofile
""".split()
)
_fd = 0  # of the socket, the only open file besides /dev/null on 0, 1 and 2
_inbox = wire.Inbox(wire.MAX_JOB)
_functions = []  # of the program, by the number under which the checks call them; the entry point is the first
_watches = {}  # what is known of each watched function, by its name
_asking = threading.RLock()  # one thread of the program at a time
_noted = None  # names of the suspicious acts reported so far; None before a program runs


def watch_acts():
    """Installs the hook that notes suspicious acts. It protects nothing."""

    def hook(event, args):
        if _noted is None:
            return
        own_frame = event == "sys._getframe" and args and args[0].f_code.co_filename == __file__
        traceback = event == "open" and str(args[0]).endswith(".py")  # looks for its source
        if own_frame or (event.startswith(_SUSPICIOUS) and not traceback):
            _note(event)

    sys.addaudithook(hook)


def _note(act):
    if act not in _noted and len(_noted) < 8:
        _noted.add(act)
        _write(pack({"suspicious": act}))


def serve(fd: int):
    """Runs the program's module code and answers calls until the socket closes."""
    global _fd, _noted
    _fd = fd
    program = _inbox.read(_fd)
    module = sys.modules["solution"] = types.ModuleType("solution")
    pristine = _trusted()
    try:
        if program["watch"]:
            code, watches = compile_watched(program["source"], program["watch"], "<program>")
            _watches.update(watches)
        else:
            code = compile(program["source"], "<program>", "exec", dont_inherit=True)
        Watch.experiment = program["experiment"]
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
    _functions.append(watched_entry_point(entry, _watches, vars(module)) if _watches else entry)
    _write(pack({"defined": _calls()}))
    while True:
        answer = _answer(_inbox.read(_fd))
        if _trusted() != pristine:
            _note("replaced a function")
        _write(answer)


def _trusted():
    # a few functions that a forger would replace; comparing all of them would copy their memory in every candidate
    return abs, all, any, isinstance, len, sorted, sum, eval, exec, copy.deepcopy, random.Random, random.randint


def _calls():
    return [watch.calls for watch in _watches.values()]


def _calls_since(before):
    return [after - calls for after, calls in zip(_calls(), before, strict=True)]


def _answer(question):
    """The packed answer to one call: its value and what it changed in its arguments, or what it raised."""
    before = _calls()
    Watch.experiment = question["experiment"]
    try:
        args, kwargs = decode_call(question, _stand_in)
        result = _functions[question["call"]](*args, **kwargs)
        answer = {"id": question["id"], "value": wire.encode(result, _functions, _note), "changed": []}
        sent = (*question["args"], *question["kwargs"].values())
        for number, value in enumerate((*args, *kwargs.values())):
            if type(value) in wire.MUTABLE and (new := wire.encode(value, _functions)) != sent[number]:
                answer["changed"].append([number, new])
        answer["calls"] = _calls_since(before)
        packed = pack(answer)
        if len(packed) > wire.MAX_ANSWER:
            raise RuntimeError(f"the answer has {len(packed)} bytes, the limit is {wire.MAX_ANSWER}")
        return packed
    except BaseException as error:
        return pack({"id": question["id"], "raised": wire.describe(error), "calls": _calls_since(before)})


def _stand_in(number):
    """A function of the checks: calling it asks the verifier, which may call the program before it answers."""

    def call(*args, **kwargs):
        with _asking:
            _write(pack(encode_call(number, args, kwargs, _functions)))
            while "call" in (message := _inbox.read(_fd)):
                _write(_answer(message))
        if "raised" in message:
            raise wire.rebuild(message["raised"], {})
        return wire.decode(message["value"], _stand_in)

    return call


def _write(packed):
    while packed:
        packed = packed[os.write(_fd, packed) :]

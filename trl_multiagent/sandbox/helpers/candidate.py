"""
The process of one program. Everything below may be subverted by it: all it can do is answer calls with plain data.

Messages on the socket, in order: hello (written before any untrusted byte is read), the program (read), the outcome of its
definitions, then one answer per question.
"""

import ast
import os
import sys
import types

from .wire import MAX_FRAME, MAX_JOB, Encoder, Inbox, Unsendable, decode, pack


FD = 3  # the candidate's only open file besides /dev/null on 0, 1 and 2
MAX_TEXT = 300  # characters of an exception's message


def serve():
    """Says hello, runs the program's module code and answers calls until the socket closes."""
    _write(pack({"hello": True}))
    inbox = Inbox(MAX_JOB)
    program = _read(inbox)
    watched = dict.fromkeys(program["watch"], 0)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    namespace = module.__dict__
    try:
        exec(_compile(program["source"], watched, namespace), namespace)
        entry = namespace.get(program["entry_point"])
        if not callable(entry):
            raise NameError(f"the program does not define {program['entry_point']!r}")
    except BaseException as error:
        _write(pack({"raised": describe(error)}))
        return
    _write(pack({"defined": True}))
    functions = [entry]
    while True:
        question = _read(inbox)
        _write(_answer(question, functions, inbox, watched))


def _compile(source, watched, namespace):
    if not watched:
        return compile(source, "<program>", "exec", dont_inherit=True)
    tree = ast.parse(source, "<program>")

    def count(function):
        def counted(*args, **kwargs):
            watched[function.__name__] += 1
            return function(*args, **kwargs)

        return counted

    namespace["__count__"] = count
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in watched:
            decorator = ast.Name("__count__", ast.Load())
            node.decorator_list.append(ast.copy_location(decorator, node))
    return compile(ast.fix_missing_locations(tree), "<program>", "exec", dont_inherit=True)


def _answer(question, functions, inbox, watched):
    """The frame that answers one call: its value and what it changed in its arguments, or what it raised."""
    number = question["id"]
    try:
        before = dict(watched)

        def stand_in(index):
            return lambda *args, **kwargs: _call_back(index, args, kwargs, inbox)

        args = [decode(value, stand_in) for value in question["args"]]
        kwargs = {name: decode(value, stand_in) for name, value in question["kwargs"].items()}
        result = functions[question["function"]](*args, **kwargs)
        answer = {"id": number, "value": Encoder(functions).encode(result)}
        changed = {}
        for index, value in enumerate(args):
            if type(value) in (list, dict, set, bytearray):
                after = Encoder(functions).encode(value)
                if after != question["args"][index]:
                    changed[index] = after
        if changed:
            answer["changed"] = changed
        if watched:
            answer["calls"] = {name: watched[name] - before[name] for name in watched}
        frame = pack(answer)
        if len(frame) > MAX_FRAME:
            raise Unsendable(f"the answer has {len(frame)} bytes, the limit is {MAX_FRAME}")
        return frame
    except BaseException as error:
        return pack({"id": number, "raised": describe(error)})


def _call_back(index, args, kwargs, inbox):
    """Calls a function that the checks passed as an argument."""
    encode = Encoder([]).encode
    arguments = {"args": [encode(value) for value in args], "kwargs": {name: encode(v) for name, v in kwargs.items()}}
    _write(pack({"call_back": index, **arguments}))
    answer = _read(inbox)
    if "raised" in answer:
        raise RuntimeError(answer["raised"])
    return decode(answer["value"], None)


def describe(error):
    """Type and message of an exception, whatever its methods do."""
    try:
        return [type(error).__name__[:80], str(error)[:MAX_TEXT]]
    except BaseException:
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

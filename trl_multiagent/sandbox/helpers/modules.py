"""
What a program may import. Nothing can be opened after the lock-down, so all of it is in memory before.

The fork of a candidate costs as much as the zygote is large. So only what programs use most is imported; the code of the
rest waits in shared memory, which a fork does not copy, until a program imports it.
"""

import importlib
import importlib.machinery
import importlib.util
import marshal
import mmap
import os
import sys


IMPORTED = """
_strptime bisect collections collections.abc copy dataclasses datetime decimal fractions functools hashlib heapq itertools
json math operator random re string struct sys time types typing
""".split()
WAITING = """
abc array ast asyncio base64 binascii calendar cmath concurrent.futures contextlib csv difflib enum gc graphlib html inspect
io keyword locale logging numbers os pprint queue secrets shlex statistics textwrap threading timeit tokenize traceback
unicodedata unittest unittest.mock urllib.parse uuid warnings weakref zlib zoneinfo encodings.ascii encodings.latin_1
encodings.utf_16 encodings.utf_32 encodings.idna
""".split()
# OpenSSL is large, and asyncio and hashlib do without it
ABSENT = ("_hashlib", "_ssl", "ssl")


class WaitingModules:
    """Imports modules from the code that waits in shared memory."""

    def __init__(self, codes: dict):
        self.places = {}
        position = 0
        for name, (is_package, code) in codes.items():
            self.places[name] = (position, position + len(code), is_package)
            position += len(code)
        self.memory = mmap.mmap(-1, max(position, 1))
        self.memory.write(b"".join(code for _, code in codes.values()))

    def find_spec(self, name, path=None, target=None):
        if name not in self.places:
            return None
        return importlib.util.spec_from_loader(name, self, origin="memory", is_package=self.places[name][2])

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        start, end, _ = self.places[module.__name__]
        exec(marshal.loads(self.memory[start:end]), vars(module))


def load():
    """Imports what is used most, and leaves the rest to an importer: afterwards no import touches a file."""
    for name in ABSENT:
        sys.modules[name] = None
    for name in IMPORTED:
        importlib.import_module(name)
    codes, compiled = _collect()
    for name in compiled:
        importlib.import_module(name)  # machine code cannot wait: mapping it needs the file
    builtin = [importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter]
    sys.meta_path[:] = [*builtin, WaitingModules(codes)]
    sys.path.clear()


def _collect():
    """Imports the waiting modules in a child, and returns the code of all that came in, and the compiled ones' names."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            present = set(sys.modules)
            for name in WAITING:
                importlib.import_module(name)
            codes, compiled = {}, []
            for name in sorted(set(sys.modules) - present):
                spec = getattr(sys.modules[name], "__spec__", None)
                loader = spec.loader if spec else None
                if isinstance(loader, importlib.machinery.SourceFileLoader):
                    package = spec.submodule_search_locations is not None
                    codes[name] = (package, marshal.dumps(loader.get_code(name)))
                elif isinstance(loader, importlib.machinery.ExtensionFileLoader):
                    compiled.append(name)
            with open(writer, "wb") as file:
                marshal.dump((codes, compiled), file)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        collected = marshal.load(file)
    os.waitpid(child, 0)
    return collected

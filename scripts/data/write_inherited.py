"""
Writes the fields of the trainers' configuration classes and of PEFT's `LoraConfig` to
`trl_multiagent/settings/inherited.json`, from which settings are checked without the import of TRL. A test compares
the file with the classes.

    python scripts/data/write_inherited.py
"""

import json
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from trl_multiagent.limits import keys_of
from trl_multiagent.settings import schema
from trl_multiagent.settings.algorithms import ALGORITHMS, import_class


PATHS = sorted({"peft.LoraConfig"}.union(*((x.config, *x.parts) for x in ALGORITHMS.values())))


def text_of(hint: Any) -> str:
    """Returns a type as text. The members of an enumeration are its values, and other libraries' types are `Any`."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if any(isinstance(part, type) and issubclass(part, Enum) for part in parts):
            parts = tuple(part for part in parts if part is not str)  # the text is one of the values
        return " | ".join(map(text_of, parts))
    if origin is Literal:
        return f"Literal{[*parts]}"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(text_of, parts))}]"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"Literal{[x.value for x in hint]}"
    if hint is types.NoneType:
        return "None"
    return hint.__name__ if getattr(hint, "__module__", "") == "builtins" else "Any"


def plain(value: Any) -> Any:
    """Returns a default as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    return value if isinstance(value, None | bool | int | float | str | list | dict) else None


def table() -> str:
    """Returns the contents of the file: each distinct field once, and the fields of each class by their numbers."""
    fields: dict[str, int] = {}
    classes = {
        path: [
            fields.setdefault(
                json.dumps([name, text_of(key.hint), plain(key.default), dict(key.limits), key.is_supported]),
                len(fields),
            )
            for name, key in keys_of(import_class(path)).items()
        ]
        for path in PATHS
    }
    lines = ",\n".join(fields), ",\n".join(f"{json.dumps(path)}: {numbers}" for path, numbers in classes.items())
    return f'{{"fields": [\n{lines[0]}\n],\n"classes": {{\n{lines[1]}\n}}}}\n'


if __name__ == "__main__":
    Path(schema.INHERITED).write_text(table(), encoding="utf-8")

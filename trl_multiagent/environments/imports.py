"""Imports the objects that a setting names, such as the functions of a task."""

import importlib
import sys
from pathlib import Path
from typing import Any

from trl_multiagent.environments.task_errors import task_code


def import_object(setting: str, path: str) -> Any:
    """
    Imports an object. Its module may be in the working directory.

    Args:
        setting (`str`): The setting that names the object, for the message.
        path (`str`): The object, as `package.module:name` or `package.module.name`.

    Raises:
        ValueError: there is no such object, or importing its module failed.
    """
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise ValueError(f"`{setting}` names {path!r}, it must have the form package.module:name.")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with task_code(f"`{setting}` names {path!r}, but importing {module} (from {folder} or an installed package)"):
        found = importlib.import_module(module)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ValueError(f"`{setting}` names {path!r}, but {module} has no {name!r}.") from None
    return found

"""Imports the objects that a setting names, such as the functions of a task."""

import importlib
import sys
from pathlib import Path
from typing import Any

from trl_multiagent.environments.task_errors import show, task_code


def import_object(setting: str, path: str, config: str | None = None) -> Any:
    """
    Imports the object that a setting names as `package.module:name` or `package.module.name`. Its module is searched
    in the working directory, then in the folder of the file `config` and the folders above, because a run's folder
    lies below that of its task. Raises `ValueError` if there is no such object, or importing its module failed.
    """
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise ValueError(f"`{setting}` names {path!r}; it must have the form package.module:name.")
    folders = [Path.cwd(), *(Path(config).absolute().parents if config is not None else ())]
    top = module.partition(".")[0]
    with_module = (x for x in folders if (x / f"{top}.py").is_file() or (x / top / "__init__.py").is_file())
    folder = str(next(with_module, folders[0]))
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


def import_function(setting: str, path: str) -> Any:
    """Imports the function that a setting names, see [`import_object`]. Raises `ValueError` if it cannot be called."""
    function = import_object(setting, path)
    if not callable(function):
        raise ValueError(f"`{setting}` names {path!r}, which is {show(function)}, not a function.")
    return function

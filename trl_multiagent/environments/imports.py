"""The tasks that have a name, and the import of the objects that a setting names, such as the functions of a task."""

import importlib
import inspect
import operator
import sys
from pathlib import Path
from typing import Any

from trl_multiagent.environments.reward_functions import is_async
from trl_multiagent.environments.task_errors import show, task_code


# The named tasks; the first is the default. The user gives any other task as `package.module:NAME`
TASKS = {
    "code_generation": "trl_multiagent.configs.recipes.demo.task:TASK",
    "bug_fixing": "trl_multiagent.configs.recipes.bug_fixing.demo:TASK",
    "block_building": "trl_multiagent.configs.recipes.block_building.demo:TASK",
    "class_completion": "trl_multiagent.configs.recipes.class_completion.demo:TASK",
    "writing": "trl_multiagent.configs.recipes.writing.demo:TASK",
    "needed": "trl_multiagent.configs.recipes.workflows.needed:TASK",
    "functions": "trl_multiagent.environments.yaml_task:TASK",
    "textarena": "trl_multiagent.tasks.textarena:TASK",
    "reasoning_gym": "trl_multiagent.tasks.reasoning_gym:TASK",
    "openenv": "trl_multiagent.tasks.openenv:TASK",
}


def import_object(setting: str, path: str, config: str | None = None) -> Any:
    """
    Imports the object that a setting names as `package.module:name` or `package.module.name`. Its module is searched
    in the working directory, in the folder of the file `config`, and among the installed packages. Raises `ValueError`
    if there is no such object, or importing its module failed.
    """
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    file = path.partition(":")[0]
    if file.endswith(".py"):
        raise ValueError(f"`{setting}` names the file {file}: write {file[:-3].replace('/', '.')}:name, its module.")
    if not module or not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise ValueError(f"`{setting}` names {path!r}; it must have the form package.module:name.")
    folders = [Path.cwd(), *([Path(config).absolute().parent] if config is not None else [])]
    top = module.partition(".")[0]
    for folder in folders if top not in sys.modules else ():  # else a folder of this name would not be used
        if (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            break
    with task_code(
        f"`{setting}` names {path!r}, but importing {module} (from {' or '.join(map(str, dict.fromkeys(folders)))}, "
        "or an installed package)"
    ):
        imported = importlib.import_module(module)
    try:
        return operator.attrgetter(name)(imported)
    except AttributeError:
        raise ValueError(f"`{setting}` names {path!r}, but {module} has no {name!r}.") from None


def import_function(setting: str, path: str, *arguments: str) -> Any:
    """
    Imports the function that a setting names, see [`import_object`]. Raises `ValueError` if it cannot be called, or
    there are `arguments` and it is `async` or does not take them.
    """
    function = import_object(setting, path)
    if not callable(function):
        raise ValueError(f"`{setting}` names {path!r}, which is {show(function)}, not a function.")
    if arguments:
        if is_async(function):
            raise ValueError(f"`{setting}` names {path!r}, which is `async`: it must be a plain function.")
        try:
            inspect.signature(function).bind(*arguments)
        except (TypeError, ValueError):
            raise ValueError(
                f"`{setting}` names {path!r}, which must be a function of {', '.join(arguments)}."
            ) from None
    return function

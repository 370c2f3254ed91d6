"""
Reads the fields of a configuration class from its source.

Importing TRL, transformers or PEFT takes several seconds. For `--help` and misspelt settings, only the fields of their classes
are needed, so these are read from the syntax trees of the installed files. The result is the same as that of
`dataclasses.fields` and `typing.get_type_hints`.
"""

import ast
import builtins
import importlib.util
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, cast

from trl_multiagent.limits import options_of


# These packages import their classes lazily, so the modules that define them cannot be found in the packages' source
DEFINED_IN = {
    ("transformers", "TrainingArguments"): "transformers.training_args",
    ("trl", "DPOConfig"): "trl.trainer.dpo_config",
    ("trl", "GRPOConfig"): "trl.trainer.grpo_config",
    ("trl", "RewardConfig"): "trl.trainer.reward_config",
}


@dataclass(frozen=True)
class ConfigField:
    """
    One field of a configuration class.

    Args:
        hint (`Any`): The type. An empty class of the same name replaces a class that would have to be imported.
        default (`Any`): The default value; the source of the expression if it is not a constant; `None` for a default factory.
        help (`str`): The entry `help` of the field's metadata.
        owner (`str`): Name of the most derived class that defines the field.
        limits ([`~limits.Limits`]): Its entry in `limits` of the class, and the values of its enumeration.
    """

    hint: Any
    default: Any
    help: str
    owner: str
    limits: Mapping[str, Any] = field(default_factory=dict)


def read_fields(path: str) -> dict[str, ConfigField]:
    """
    The fields of a dataclass, those of its base classes first.

    Args:
        path (`str`): Path of the class, such as `trl.trainer.grpo_config.GRPOConfig`.
    """
    module, _, name = path.rpartition(".")
    fields, limits = _read_class(module, name)
    return {
        name: replace(one, limits={**enumerated(one.hint), **limits.get(name, {})}) for name, one in fields.items()
    }


def enumerated(hint: Any) -> dict[str, Any]:
    """The choices of a field whose type is an enumeration."""
    values = [
        tuple(x.value for x in option)
        for option in options_of(hint)
        if isinstance(option, type) and issubclass(option, Enum)
    ]
    return {"choices": values[0]} if values else {}


def class_names(path: str) -> list[str]:
    """The names of a class and of its base classes, the most derived first."""
    module, _, name = path.rpartition(".")
    found = _find_class(module, name)
    if found is None:
        return []
    bases = [base.id for base in found[1].bases if isinstance(base, ast.Name)]
    return list(dict.fromkeys([name, *(other for base in bases for other in class_names(f"{found[0]}.{base}"))]))


def _read_class(module: str, name: str) -> tuple[dict[str, ConfigField], dict[str, dict[str, Any]]]:
    """The fields of a class and its `limits`, with those of its base classes."""
    fields: dict[str, ConfigField] = {}
    limits: dict[str, dict[str, Any]] = {}
    found = _find_class(module, name)
    if found is None:
        return fields, limits  # `object`, `Generic`, ...
    module, definition = found
    for base in reversed(definition.bases):
        if isinstance(base, ast.Name):
            inherited_fields, inherited_limits = _read_class(module, base.id)
            fields |= inherited_fields
            limits |= inherited_limits
    for statement in definition.body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if "ClassVar" in ast.unparse(statement.annotation):
            if statement.target.id == "limits":
                limits |= _evaluate(module, cast(ast.expr, statement.value))
            continue
        default, help = _read_value(module, statement.value)
        fields[statement.target.id] = ConfigField(_read_hint(module, statement.annotation), default, help, name)
    return fields, limits


def _read_value(module: str, value: ast.expr | None) -> tuple[Any, str]:
    """The default and the help of `x: T = value`, where the value may be `field(default=..., metadata={"help": ...})`."""
    if value is None:
        return None, ""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "dataclasses.field")):
        return _evaluate(module, value), ""
    arguments = {keyword.arg: keyword.value for keyword in value.keywords}
    default = _evaluate(module, arguments["default"]) if "default" in arguments else None
    metadata = arguments.get("metadata")
    if isinstance(metadata, ast.Dict):
        for key, text in zip(metadata.keys, metadata.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "help":
                return default, str(_evaluate(module, text))
    return default, ""


def _evaluate(module: str, node: ast.expr) -> Any:
    """The value of an expression that only contains literals and constants of its module; otherwise its source."""
    names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    if not names <= _constants(module).keys():
        return ast.unparse(node)
    return eval(compile(ast.Expression(node), module, "eval"), dict(_constants(module)))


@cache
def _constants(module: str) -> dict[str, Any]:
    """The constants of a module and its classes: names to which a literal is assigned."""
    constants = {}
    for node in ast.walk(_parse(module)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                constants[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:  # not a literal
                continue
    return constants


def _read_hint(module: str, annotation: ast.expr) -> Any:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    code = compile(ast.fix_missing_locations(ast.Expression(annotation)), module, "eval")
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    return eval(code, {name: _read_name(module, name) for name in names})


def _read_name(module: str, name: str) -> Any:
    """The value of a name in an annotation."""
    if name in vars(builtins):
        return vars(builtins)[name]
    if name in vars(typing):
        return vars(typing)[name]
    found = _find_class(module, name)
    if found is None or not any(ast.unparse(base).endswith("Enum") for base in found[1].bases):
        return type(name, (), {})
    members = [statement for statement in found[1].body if isinstance(statement, ast.Assign)]
    return Enum(name, [(ast.unparse(member.targets[0]), _evaluate(found[0], member.value)) for member in members])


def _find_class(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """Finds a class that a module defines or imports. Returns the module that defines it, and the definition."""
    for statement in ast.walk(_parse(module)):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return module, statement
        if isinstance(statement, ast.ImportFrom) and name in [alias.asname or alias.name for alias in statement.names]:
            source = statement.module or ""
            if statement.level:
                package = module if _source_file(module).name == "__init__.py" else module.rpartition(".")[0]
                source = importlib.util.resolve_name("." * statement.level + source, package)
            source = DEFINED_IN.get((source, name), source)
            if _find_file(source) is not None:
                return _find_class(source, name)
    return None


@cache
def _parse(module: str) -> ast.Module:
    return ast.parse(_source_file(module).read_text(encoding="utf-8"))


def _source_file(module: str) -> Path:
    file = _find_file(module)
    if file is None:
        raise ModuleNotFoundError(f"There is no source file of the module {module}.")
    return file


def _find_file(module: str) -> Path | None:
    """
    The source file of a module; `None` if there is none. Only the top-level package is looked up, because looking up a module
    in it would import the package.
    """
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], *parts)
    files = (path.with_suffix(".py"), path / "__init__.py") if parts else (path / "__init__.py",)
    return next((file for file in files if file.is_file()), None)

"""
Reads the settings of a recipe from a YAML file, `--override` and flags, merges them and checks them.

Each of the three sources is a layer, a dict of sections. Overrides win over the file, and flags win over both. No slow library is
imported here, so `--help` and error messages appear at once.
"""

import argparse
import ast
import copy
import dataclasses
import difflib
import re
import sys
import typing
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trl_multiagent.environments.task import Task
from trl_multiagent.limits import describe_type, leaves, problem_with, read_value, short
from trl_multiagent.models.lora_limits import LORA_LIMITS
from trl_multiagent.recipe.algorithms import ACTOR_CRITICS, ALGORITHMS, ITERATIVE, SECTION_CLASSES
from trl_multiagent.recipe.comlrl import (
    BLANK_IS_NULL,
    HISTORY,
    NO_EFFECT,
    NULL_IS_DEFAULT,
    RENAMED,
    SECOND_WINS,
    SECRETS,
    TASK_SECTIONS,
    UNAVAILABLE,
)
from trl_multiagent.recipe.fields import ConfigField, read_fields
from trl_multiagent.recipe.sections import (
    LORA_CONFIG,
    NOT_IN_PEFT,
    TRL_FLAGS,
    TRL_NAMES,
    VALUES,
    AgentModel,
    extras_of,
    sections_of,
)
from trl_multiagent.terminal import printable


MISSING = "???"  # OmegaConf's marker of a missing value


class ConfigError(ValueError):
    """A setting is wrong; the message names it and says what to do, on one line."""

    def __init__(self, message: object):
        super().__init__(" ".join(str(message).split()))


def fail(prog: str, error: Exception) -> NoReturn:
    """Ends the program as `argparse` does after a wrong argument: one line, and exit status 2."""
    print(f"{prog}: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    sys.exit(2)


# Layers


def read_layers(algorithm: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The three layers, under the names of this release."""
    layers = [read_yaml(arguments.config), parse_overrides(arguments.override), flag_layer(algorithm, arguments)]
    for layer in layers:
        rename(algorithm, layer)
    return layers


def read_yaml(path: str | None) -> dict[str, Any]:
    """The layer of the YAML file."""
    if path is None:
        return {}
    try:
        sections = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"--config {path} is not valid YAML: {error}") from error
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror or 'it must hold sections'}.") from error
    if not OmegaConf.is_dict(sections):
        raise ConfigError(f"--config {path} must hold sections, each a name with keys below it, not a list.")
    layer = typing.cast(dict[str, Any], OmegaConf.to_container(sections))
    for name, body in layer.items():
        for key in (name, *(body if isinstance(body, dict) else ())):
            if not isinstance(key, str):
                raise ConfigError(
                    f"--config {path} has the key {key!r}, which YAML reads as {type(key).__name__}: keys are the names of "
                    "settings; write this key in quotes."
                )
    return layer


def parse_overrides(overrides: list[str]) -> dict[str, Any]:
    """The layer of `--override`."""
    layer: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigError(f"--override {override!r} must have the form section.key=value.")
        set_path(layer, path, parse_value(text))
    return layer


def flag_layer(algorithm: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The layer of the flags."""
    flags = {name: value for name, value in vars(arguments).items() if name not in ("config", "override", "dry_run")}
    agent_model = [field.name for field in dataclasses.fields(AgentModel)]
    layer: dict[str, Any] = {}
    short = {"task": "task", "model_name": "agent_model.name", "output_base_dir": "output.base_dir"}
    for name, path in {**short, **TRL_FLAGS}.items():
        if name in flags:
            set_once(layer, f"--{name}", path, flags.pop(name))
    for name, texts in flags.items():
        values = [parse_value(text) for text in texts] or [True]  # a flag without a value means true
        section = "agent_model" if name in agent_model else algorithm
        set_path(layer, f"{section}.{name}", values if len(values) > 1 else values[0])
    return layer


def parse_value(text: str) -> Any:
    """
    The value of a text on the command line: true, false, none or null in any case, a Python literal, a list such as `[a,b]` or a
    mapping such as `{a: 1}` as in YAML, or the text itself. Rows of a split, such as `[16:]`, are text.
    """
    constants = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        value = ast.literal_eval(text)
        if is_plain(value):
            return list(value) if isinstance(value, tuple) else value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass  # not Python
    if not re.fullmatch(r"\[[^:]*\]|\{.*\}", text, re.DOTALL):
        return text
    try:
        return OmegaConf.to_container(OmegaConf.create(text))
    except (YAMLError, OmegaConfBaseException):
        return text


def is_plain(value: Any) -> bool:
    """Whether a Python literal consists of the types that YAML has, unlike a set, a complex number or bytes."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(x) for key, x in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)


def set_path(layer: dict[str, Any], path: str, value: Any) -> None:
    """Sets `layer["a"]["b"]` for the path `a.b`."""
    *parents, name = path.split(".")
    for parent in parents:
        if not isinstance(layer.get(parent), dict):
            layer[parent] = {}
        layer = layer[parent]
    layer[name] = value


def set_once(layer: dict[str, Any], name: str, path: str, value: Any) -> None:
    """The same, for an alternative `name` of the path. Raises an error if the path has another value."""
    found, other = pop_path(layer, path)
    if found and other != value:
        raise ConfigError(f"`{name}: {value}` and `{path}: {other}` are the same setting; give only one of them.")
    set_path(layer, path, value)


def pop_path(layer: dict[str, Any], path: str) -> tuple[bool, Any]:
    """Removes `layer["a"]["b"]` for the path `a.b`. Returns whether it was present, and its value."""
    *parents, name = path.split(".")
    for parent in parents:
        inner = layer.get(parent)
        if not isinstance(inner, dict):
            return False, None
        layer = inner
    return name in layer, layer.pop(name, None)


def rename(algorithm: str, layer: dict[str, Any]) -> None:
    """
    Replaces alternative names of settings by ours, in place. A value that is not used, because ours has another one, stays under its
    alternative name; [`check`] reports it. The section of an algorithm in rounds may have the name of what each round is.
    """
    if algorithm in ITERATIVE:
        section = ITERATIVE[algorithm]
        body = layer.pop(section, None)
        if not isinstance(body, dict | None):
            raise ConfigError(f"`{section}` is {short(body)}, it must be a section with keys below it.")
        for name, value in (body or {}).items():
            set_once(layer, f"{section}.{name}", f"{algorithm}.{name}", value)
    for name, our_name in {**RENAMED, **TRL_NAMES}.items():
        old, new = name.format(algorithm=algorithm), our_name.format(algorithm=algorithm)
        found, value = pop_path(layer, old)
        if found:
            twice, other = pop_path(layer, new)
            if twice and other != value and name in SECOND_WINS:
                if value is not None:
                    set_path(layer, old, value)
                value = other
            elif twice and other != value:
                raise ConfigError(
                    f"`{old}: {value}` and `{new}: {other}` are the same setting; give only one of them."
                )
            set_path(layer, new, value)


def merge(layers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merges layers. Dicts are merged recursively; of other values, that of the last layer wins."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            before = merged.get(name)
            if isinstance(before, dict) and isinstance(value, dict):
                merged[name] = merge([before, value])
            else:
                merged[name] = copy.deepcopy(value)
    return merged


def resolve(merged: dict[str, Any]) -> dict[str, Any]:
    """The settings with the values of references, such as `${seed}` or `${oc.env:HOME}`, in their place, as OmegaConf does."""
    try:
        return typing.cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(merged), resolve=True))
    except OmegaConfBaseException as error:
        raise wrong_reference(error) from error


def wrong_reference(error: OmegaConfBaseException) -> ConfigError:
    """The error for a text that looks like a reference."""
    problem = str(error).split("\n")[0]
    return ConfigError(
        f"`{error.full_key or 'a setting'}` is not a valid reference `${{...}}` to another setting: {problem}. "
        "Correct it, or write \\${ for text."
    )


# Checks


def check(algorithm: str, task: Task, merged: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """
    Checks names and types of all settings.

    Args:
        algorithm (`str`): Name of the algorithm's section.
        task ([`~trl_multiagent.environments.task.Task`]): The task, which has sections of its own.
        merged (`dict`): The merged layers.

    Returns:
        `tuple[dict[str, dict[str, Any]], list[str]]`: The settings by section, with top-level settings under `""`, and the paths
        of the given settings that have no effect.

    Raises:
        ConfigError: a name is unknown, a value has the wrong type, or a feature is not available in this release.
    """
    sections = sections_of(task)
    known = known_settings(algorithm, task)
    no_effect = [path for path in (path.format(algorithm=algorithm) for path in NO_EFFECT) if path not in known]
    not_used = {old.format(algorithm=algorithm): new.format(algorithm=algorithm) for old, new in SECOND_WINS.items()}
    secrets = {old.format(algorithm=algorithm): new.format(algorithm=algorithm) for old, new in SECRETS.items()}
    null_is_default = [path.format(algorithm=algorithm) for path in NULL_IS_DEFAULT]
    values: dict[str, dict[str, Any]] = {section: {} for section in ("", algorithm, "peft", *sections)}
    names = [name for name in values if name]
    without_effect: list[str] = []
    resolved = resolve(merged)
    for section, body in resolved.items():
        if section in ("critic_model", "critics") and algorithm not in ACTOR_CRITICS and body:
            raise ConfigError(f"`{section}` cannot be used: `{algorithm}` has no critics. Remove it.")
        if section in UNAVAILABLE or (section in ALGORITHMS and section != algorithm):
            if body:
                reason = UNAVAILABLE.get(section, f"this script trains with `{algorithm}`")
                raise ConfigError(f"the section `{section}` cannot be used: {reason}. Remove it.")
            continue
        is_section = section in values
        if not is_section and isinstance(body, dict) and section in TASK_SECTIONS:
            names_used = [old for old, new in RENAMED.items() if new in [f"{section}.{name}" for name in body]]
            raise ConfigError(
                f"`{'`, `'.join(names_used or [section])}` cannot be used: the task `{section}` has this setting, and this run "
                f"trains on another task. Set `task: {section}` for `trl-multiagent train`, or remove it."
            )
        if is_section and not isinstance(body, dict | None):
            raise ConfigError(f"`{section}` is {short(body)}, it must be a section with keys below it.")
        settings = {f"{section}.{name}": x for name, x in (body or {}).items()} if is_section else {section: body}
        for path, value in settings.items():
            if path in secrets:
                if value not in (None, {}, ""):
                    raise ConfigError(
                        f"`{path}` cannot be used, because settings are saved with the run: put the key into an environment variable, and "
                        f"its name into `{secrets[path]}`."
                    )
            elif path in no_effect:
                if value not in (None, {}, []):
                    without_effect.append(path)
            elif path in not_used:
                without_effect.append(f"{path} (`{not_used[path]}` is used)")
            elif path in known:
                owner, _, name = path.rpartition(".")
                if value is None and path in null_is_default:
                    continue
                if value == "" and path in BLANK_IS_NULL and resolved.get(BLANK_IS_NULL[path]):
                    continue
                if any(x == MISSING for _, x in leaves(value)):
                    raise ConfigError(f"`{path}` is {MISSING}, which stands for a missing value: give it one.")
                values[owner][name] = check_value(algorithm, path, value, known[path])
                if "no_effect" in known[path].limits:
                    without_effect.append(f"{path} ({known[path].limits['no_effect']})")
            else:
                other_names = [old.format(algorithm=algorithm) for old in {**RENAMED, **TRL_NAMES}]
                raise ConfigError(f"`{path}` is not a known setting{suggestion(path, [*known, *other_names], names)}")

    if (values[algorithm].get("num_turns") or 1) == 1:
        of_past = (*HISTORY, "max_history_length")
        history = [name for name in of_past if values[algorithm].get(name) is not None]
        without_effect += [f"{algorithm}.{name} (one turn has no past)" for name in history]
    return values, without_effect


def known_settings(algorithm: str, task: Task) -> dict[str, ConfigField]:
    """All settings, by path."""
    known = {path: ConfigField(hint, None, "", "") for path, hint in VALUES.items()}
    known["seed"] = dataclasses.replace(known["seed"], limits=read_fields(SECTION_CLASSES[algorithm])["seed"].limits)
    for section, cls in sections_of(task).items():
        known |= section_settings(section, cls)
    known |= {f"{algorithm}.{name}": field for name, field in read_fields(SECTION_CLASSES[algorithm]).items()}
    known |= section_settings(algorithm, extras_of(algorithm))
    for name, field in read_fields(LORA_CONFIG).items():
        if name not in NOT_IN_PEFT:
            known[f"peft.{name}"] = dataclasses.replace(field, limits=LORA_LIMITS.get(name, {}))
    # Many settings of an evaluation have the name of one of the training, which is the one to suggest
    return dict(sorted(known.items(), key=lambda setting: setting[0].startswith("evaluation.")))


def section_settings(section: str, cls: type) -> dict[str, ConfigField]:
    """The settings of one section, by path."""
    hints = typing.get_type_hints(cls)
    return {
        f"{section}.{field.name}": ConfigField(hints[field.name], field.default, "", cls.__name__, field.metadata)
        for field in dataclasses.fields(cls)
    }


def suggestion(path: str, known: Iterable[str], sections: Collection[str] = ()) -> str:
    """
    The end of an error message. It suggests a similar name of a section, the same name in another section, or a similar name.

    Args:
        path (`str`): The unknown name.
        known (`Iterable[str]`): All names.
        sections (`Collection[str]`, *optional*): The names of the sections.
    """
    known = list(known)
    section, _, name = path.rpartition(".")
    candidates = [] if section else difflib.get_close_matches(path, sections, n=1, cutoff=0.75)
    candidates += [other for other in known if other.rpartition(".")[2] == name]
    candidates += difflib.get_close_matches(path, known, n=1) + difflib.get_close_matches(name, known, n=1)
    return f"; did you mean `{candidates[0]}`?" if candidates else "; see --help."


def check_value(algorithm: str, path: str, value: Any, field: ConfigField) -> Any:
    """Checks type and limits of a value, and returns it with its type. Raises `ConfigError` if it is wrong."""
    try:
        typed = read_value(value, field.hint)
        problem = problem_with(typed, field.limits, field.default)
    except TypeError:
        given = "null" if value is None else f"{short(value)} ({type(value).__name__})"
        problem = f"is {given}, expected {describe_type(field.hint)}."
    if problem is not None:
        names = [path] + [
            old.format(algorithm=algorithm)
            for old, new in {**RENAMED, **TRL_NAMES}.items()
            if new.format(algorithm=algorithm) == path
        ]
        raise ConfigError(f"`{'` or `'.join(names)}` {problem}")
    return typed

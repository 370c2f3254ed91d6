"""
Checks the values of settings.

A setting is a dataclass field that [`setting`] makes, with a type annotation and limits such as bounds or choices.
[`check_value`] checks both, for the reader of YAML files and, in [`check_arguments`], for arguments from Python.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import operator
import re
import types
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError


Class = TypeVar("Class", bound=type)
LARGEST_INTEGER = 2**63 - 1
NUMBERS = (int, float, int | None, float | None)
# Inherited numbers that must be greater than 0, and other limits that `limits_of` does not derive from their types
POSITIVE = """
    per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps num_train_epochs
    save_steps r lora_r adam_epsilon ddp_timeout num_iterations ref_model_sync_steps delta repetition_penalty
""".split()
INHERITED = {
    **{name: {"gt": 0} for name in POSITIVE},
    **{name: {"ge": 0, "lt": 1} for name in ("adam_beta1", "adam_beta2")},
    "min_p": {"ge": 0, "le": 1},
    "data_seed": {"ge": 0},
    "max_steps": {"ge": -1, "ne": 0},  # -1 says nothing, and transformers would take 0 for it: all epochs
}
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
# Names that people type for ours, from other libraries or for short
TYPED = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "resume": "resume_from_checkpoint",
    "output": "output_dir",
    "max_tokens": "max_completion_length",
    "max_new_tokens": "max_completion_length",
    "max_prompt_length": "max_history_length",
    "n": "num_generations",
    "group_size": "num_generations",
    "kl_coef": "beta",
}
# What does here what an argument of TRL does there
IN_PLACE_OF = {
    "generation_batch_size": "`items_per_device` says how many items a step has",
    "model_init_kwargs": "give them to `AgentTeam.from_pretrained`",
    "multi_objective_aggregation": '`advantage_normalization="rewards"` is `normalize_then_sum`',
    "reward_weights": "an argument of `FunctionEnvironment`",
    "steps_per_generation": "`items_per_device` says how many items a step has",
}
MAX_NAMES = 8  # of a choice that an error lists; of more, the most similar ones
# Replacements of words in pydantic's messages
WORDS = {
    "be a valid boolean": "be true or false",
    "Value error, ": "",
    "Input should ": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


class Setting(dataclasses.Field):
    """A field of a dataclass with the limits of its values, as [`setting`] makes it."""

    __slots__ = ("limits",)
    limits: dict[str, Any]

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)
        if not self.metadata["help"]:
            self.metadata = types.MappingProxyType({"help": documented(owner, name)})


def documented(cls: type, name: str) -> str:
    """
    Returns the entry of a parameter in the docstring of a class, in the form of transformers and TRL, as one line.
    """
    text = inspect.cleandoc(cls.__doc__ or "")
    entry = re.search(rf"^    {name} \(.+?\):\s(.+?)(?=\n    \S|\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    return re.sub(r"\[(`)~?(.+?`)\]", r"\1\2", " ".join(entry[1].split())) if entry else ""


def setting(help: str = "", default: Any = None, **limits: Any) -> Any:
    """
    Describes one setting. Use it as the default of a field in the dataclass of a section.

    Args:
        help (`str`, *optional*): Text for `--help`. By default, it is the text of the parameter in the docstring of
            the class.
        default (`Any`, *optional*): Value of the setting if the user does not give one.
        **limits: The allowed values: `choices=("a", "b")`, bounds of a number such as `ge=0, lt=1`, or `ne=0` to
            exclude a number. The limits of a list or dict apply to each entry. `keys=("a", "b")` are the allowed keys
            of a dict. Numbers must be finite, texts not blank.
    """
    plain = dataclasses.field(default=default, metadata={"help": help})  # `HfArgumentParser` passes `help` to argparse
    field = Setting(**{name: getattr(plain, name) for name in inspect.signature(dataclasses.Field).parameters})
    field.limits = limits
    return field


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting: its type, its default, its limits as in [`setting`], and its help."""

    hint: Any
    default: Any
    limits: Mapping[str, Any]
    help: str
    is_supported: bool = True  # if not, it must keep its default

    @property
    def choices(self) -> tuple[Any, ...]:
        """The texts that it takes, if these are listed."""
        parts = (self.hint, *get_args(self.hint))
        found = [get_args(part) for part in parts if get_origin(part) is Literal]
        return (*self.limits.get("choices", ()), *itertools.chain(*found))


def keys_of(cls: type) -> dict[str, Key]:
    """
    Returns the fields of a dataclass as settings. Those in the ClassVar `unsupported` of the class and its base
    classes must keep their defaults.
    """
    keys, hints, unsupported = {}, get_type_hints(cls), unsupported_by(cls)
    for field in dataclasses.fields(cls):
        name, hint = field.name, hints[field.name]
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        help = field.metadata.get("help", "")
        keys[name] = Key(hint, default, limits_of(field, hint), help, name not in unsupported)
    return keys


def check_value(name: str, value: Any, key: Key) -> Any:
    """
    Checks the value of a setting against its type and its limits, and returns it with that type: a number that YAML
    reads as text, such as `1e-5`, becomes a number, and a single value becomes a list where only a list is allowed.
    Raises a `ValueError` that begins with the setting's `name` if the value is not allowed.
    """
    if type(value) is type(key.default) and value == key.default:
        return value
    if not key.is_supported:
        is_default = value is None or read_number(value) == key.default  # 1 is 1.0, too
        if not is_default and (is_on(value) or is_on(key.default)):
            raise ValueError(
                f"`{name}` is {short(value)}, which teams do not support: "
                f"{IN_PLACE_OF.get(name.rpartition('.')[2], 'leave it out')}."
            )
        return key.default  # TRL would compute with a blank, or with 0 for none
    adapter = TypeAdapter(_constrained(key.hint, key.limits), config=STRICT)
    try:
        checked = adapter.validate_python(value)
    except ValidationError as error:
        if not isinstance(value, list | dict | None):
            with contextlib.suppress(ValidationError):
                return adapter.validate_python([value])
        raise ValueError(f"`{name}` {_describe(error, value)}") from error
    if isinstance(checked, dict | list) and not _is_finite(checked):  # the type of an entry may be `Any`
        raise ValueError(f"`{name}` is {short(value)}; it must have finite numbers only.")
    if isinstance(checked, dict) and checked.keys() - key.limits.get("keys", checked):
        raise ValueError(f"`{name}` is {short(value)}; it must only have {', '.join(map(repr, key.limits['keys']))}.")
    return checked


def check_arguments(args: Any) -> None:
    """
    Checks the arguments of a configuration class that [`setting`] describes, and inherited numbers. TRL and
    transformers check the others. Raises `ValueError` if a value is not allowed.
    """
    keys = keys_of(type(args))
    for field in dataclasses.fields(args):
        key = keys[field.name]
        is_ours = isinstance(field, Setting) or not key.is_supported
        if is_ours or key.hint in NUMBERS:
            given = getattr(args, field.name)
            checked = check_value(field.name, given, key)
            if is_ours or isinstance(given, str):
                setattr(args, field.name, checked)


def limits_of(field: Any, hint: Any) -> dict[str, Any]:
    """
    Returns the limits of a field. Numbers of TRL, transformers or PEFT must not be negative, unless their default is,
    and optional counts must not be 0, because these libraries check that only when they train.
    """
    if isinstance(field, Setting):
        return field.limits
    if field.name in INHERITED:
        return INHERITED[field.name]
    if "choices" in field.metadata:  # of transformers
        return {"choices": tuple(field.metadata["choices"])}
    is_negative = isinstance(field.default, int | float) and field.default < 0
    is_count = hint in (int | None, int | str | None)
    return {} if is_negative else {"gt" if is_count else "ge": 0}


def similar_name(name: str, known: Collection[str]) -> str | None:
    """Returns the known name that somebody who typed another one most likely means, if there is one."""
    if TYPED.get(name) in known:
        return TYPED[name]
    return next(iter(difflib.get_close_matches(name, known)), None)


def explained(cls: Class) -> Class:
    """
    Decorates a class: a call with an argument that it does not have raises a `TypeError` that says which one to take.
    The attribute `in_place_of` of the class has advice by the names of other libraries' arguments.
    """
    init = cls.__init__  # type: ignore[misc]
    names = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                similar = similar_name(name, names)
                advice = f"did you mean `{similar}`?" if similar else f"it has {', '.join([*names][1:MAX_NAMES])}, ..."
                advice = getattr(self, "in_place_of", {}).get(name, advice)
                raise TypeError(f"{type(self).__name__} has no argument `{name}`: {advice}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def check_dataset(name: str, value: Any) -> None:
    """Raises a `TypeError` that says how to make a `datasets.Dataset` of a value, unless it is one."""
    from datasets import Dataset

    if isinstance(value, Dataset):
        return
    advice = {
        "list": ": `Dataset.from_list(rows)` makes one",
        "dict": ": `Dataset.from_dict(columns)` makes one",
        "str": f": `load_dataset({value!r}, split=...)` loads one",
        "DataFrame": ": `Dataset.from_pandas(frame)` makes one",
        "IterableDataset": ": `Dataset.from_list(list(...))` makes one",
        "DatasetDict": f": choose a split of {[*value] if isinstance(value, dict) else ''}",
    }
    kind = type(value).__name__
    raise TypeError(f"`{name}` must be a `datasets.Dataset`, got `{kind}`{advice.get(kind, '')}.")


def is_on(value: Any) -> bool:
    """Returns whether a value switches a feature on. Command-line parsers read `no` as False."""
    return bool(value) and value != "no"


def unsupported_by(cls: type) -> list[str]:
    """Returns the inherited arguments that a configuration class does not support."""
    return [name for base in cls.__mro__ for name in vars(base).get("unsupported", ())]


def short(value: Any) -> str:
    """Returns a value as one short line for a message."""
    if value is None:
        return "null"
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return f"an integer of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}..."


def _constrained(hint: Any, limits: Mapping[str, Any]) -> Any:
    """Returns the type with the limits, for pydantic."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, (_constrained(part, limits) for part in parts))
    if origin is list:
        return list[_constrained(parts[0], limits)]  # type: ignore[misc]
    if origin is dict:
        return dict[parts[0], _constrained(parts[1], limits)]  # type: ignore[misc, valid-type]
    if origin is Literal and "no" in parts:
        return Annotated[hint, BeforeValidator(lambda x: "no" if x is False else x)]  # YAML reads a bare `no` as false
    if hint is types.NoneType:
        return None
    if "choices" in limits and hint not in (int, float):
        return Literal[tuple(limits["choices"])]
    if hint is str:
        return Annotated[str, AfterValidator(_check_text)]
    if hint not in (int, float):
        return hint
    bounds = {name: limits[name] for name in ("gt", "ge", "lt", "le") if name in limits}
    if hint is int:
        bounds = {"le": LARGEST_INTEGER, **bounds}
    differ = AfterValidator(functools.partial(_differ, limits.get("ne")))
    return Annotated[hint, Field(**bounds), BeforeValidator(read_number), differ]


def read_number(value: Any) -> Any:
    """Converts a text such as 1e-5 to a number. YAML reads it as text, because it has no point."""
    is_number = isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value)
    return float(value) if is_number else value


def _check_text(value: str) -> str:
    if not value.strip():
        raise ValueError("Input should not be blank: give it a value, or leave it out")
    return value


def _differ(forbidden: float | None, value: float) -> float:
    if value == forbidden:
        raise ValueError(f"Input should be other than {forbidden}")
    return value


def _is_finite(value: Any) -> bool:
    """Returns whether all numbers in nested lists and dicts are finite."""
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _describe(error: ValidationError, value: Any) -> str:
    """Describes the error, as the end of a sentence that starts with the name of the setting."""
    problems = error.errors(include_url=False)
    first = problems[0]
    keys = [part for part in first["loc"] if isinstance(value, dict) and part in value]
    where = f" for {keys[0]!r}" if keys else " (as a flag without a value)" if value is True else ""
    text = " or ".join(dict.fromkeys(problem["msg"].partition(", got ")[0] for problem in problems))
    if len(names := re.findall(r"'([^']+)'", text)) > MAX_NAMES:
        similar = difflib.get_close_matches(str(value), names, MAX_NAMES, cutoff=0.0)
        text = f"be one of {len(names)} names, such as {', '.join(map(repr, similar))}"
    for word, ours in WORDS.items():
        text = text.replace(word, ours)
    return f"is {short(first['input'])}{where}; it must {text}."

"""User-supplied prompt templates and functions, which replace the prompts of a task family."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, ClassVar

from trl_multiagent.environments.base import Prompt, check_prompt
from trl_multiagent.environments.imports import import_function
from trl_multiagent.environments.task_errors import task_code


FUNCTION = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")  # package.module:name


@dataclass(frozen=True)
class OwnPrompt:
    """A prompt that the user gave: a template or a function."""

    setting: str  # the setting that gave it, for messages
    template: str | None = None  # a text with fields such as `{prompt}`
    function: Callable[..., Prompt] | None = None  # returns a prompt

    def make(self, values: Mapping[str, str], *arguments: Any) -> Prompt:
        """
        Makes the prompt: fills the template with `values`, or calls the function with the `arguments`. Raises
        [`TaskError`] if the function fails, or does not return a prompt.
        """
        if self.function is None:
            return (self.template or "").format(**values)
        name = f"The function of `{self.setting}`"
        with task_code(name):
            prompt = self.function(*arguments)
        check_prompt(name, prompt)
        return prompt


@dataclass
class PromptFiles:
    """
    Base of a section in which each setting replaces one prompt of a family. The value of a setting is the path of a
    template in UTF-8, a function as `package.module:name`, or the text of a template, which contains a brace or the
    end of a line.

    A subclass names in `takes`, for each setting, the fields of its templates and the names of its function's
    arguments.
    """

    takes: ClassVar[dict[str, tuple[Sequence[str], Sequence[str]]]] = {}
    section: ClassVar[str] = "prompt_files"

    def __post_init__(self) -> None:
        self.prompts = {
            name: read_prompt(f"{self.section}.{name}", value, *self.takes[name])
            for name, value in self.given().items()
        }

    def given(self) -> dict[str, str]:
        """Returns the settings that have a value."""
        return {name: getattr(self, name) for name in self.takes if getattr(self, name) is not None}

    def saved(self) -> dict[str, str]:
        """
        Returns the settings with the texts of the templates in place of their paths. They are saved with the run.
        """
        saved = self.given()
        for name, prompt in self.prompts.items():
            if prompt.template is not None:
                # OmegaConf would read `${` as another setting, so it is escaped, and so are backslashes in front of it
                saved[name] = re.sub(r"(\\*)\$\{", r"\1\1\\${", prompt.template)
        return saved


def is_template(value: str) -> bool:
    """Returns whether the value of a setting is the text of a template."""
    return "{" in value or "\n" in value


def read_prompt(setting: str, value: str, fields: Sequence[str], arguments: Sequence[str]) -> OwnPrompt:
    """
    Reads the value of a setting, see [`PromptFiles`]. Raises `ValueError` if there is no such file or function, the
    file is not UTF-8 text, a template has a field other than `fields`, or a function does not take these `arguments`.
    """
    if is_template(value):
        check_template(f"`{setting}`", value, fields)
        return OwnPrompt(setting, template=value)
    if FUNCTION.fullmatch(value):
        return OwnPrompt(setting, function=import_function(setting, value, *arguments))
    try:
        template = Path(value).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(
            f"`{setting}` is {value!r}, but there is no such file in {Path.cwd()}. Give the path of a template, "
            "or a function as package.module:name."
        ) from None
    except (OSError, ValueError) as error:  # such as a `UnicodeDecodeError`
        raise ValueError(f"`{setting}`: the file {value!r} cannot be read as UTF-8 text: {error}.") from None
    if not template.strip():
        raise ValueError(f"`{setting}`: the file {value} is empty.")
    check_template(f"`{setting}`: the file {value}", template, fields)
    # The text is saved with the run, where it must not look like the path of a file
    return OwnPrompt(setting, template=template if is_template(template) else f"{template}\n")


def check_template(name: str, template: str, fields: Sequence[str]) -> None:
    """Raises `ValueError` if a template has a field other than `fields`, or a brace without its partner."""
    advice = f"Fields are {', '.join(f'{{{field}}}' for field in fields)}; write {{{{ and }}}} for braces."
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{name} is not a template: {error}. {advice}") from None
    for _, field, form, conversion in parts:
        if field is not None and (field not in fields or form or conversion):
            written = f"{{{field}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}}}"
            raise ValueError(f"{name} has the field {written}, which is not known. {advice}")

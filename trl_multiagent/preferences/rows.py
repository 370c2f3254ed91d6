"""
The rows of a dataset of joint preferences: the names of its columns, and the check of every row.

A row compares two joint answers to one item, the chosen and the rejected one. For every role r of the team it has the
columns `r_prompt`, `r_chosen` and `r_rejected`, which are texts, or chat messages as in TRL's conversational datasets.
The other columns are optional:

| column | contents |
| --- | --- |
| `chosen_reward`, `rejected_reward` | the joint rewards; both or neither |
| `chosen_<metric>`, `rejected_<metric>` | components of the rewards |
| `item_id`, `round` | the item, and the round of collection |
| `chosen_by`, `rejected_by` | the policy that sampled the answer |
| `r_chosen_answer`, `r_rejected_answer` | the answer, if the completion has a reasoning before it |
| `r_chosen_token_ids`, `r_rejected_token_ids` | the token ids that were sampled |
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from datasets import Dataset, disable_caching, enable_caching, is_caching_enabled

from trl_multiagent.environments.base import as_messages, is_message
from trl_multiagent.limits import check_dataset


CHOSEN_REWARD, REJECTED_REWARD = "chosen_reward", "rejected_reward"
ITEM_ID, ROUND, CHOSEN_BY, REJECTED_BY = "item_id", "round", "chosen_by", "rejected_by"

Messages = list[dict[str, Any]]
PairRow = dict[str, Any]


def text_columns(role: str) -> tuple[str, str, str]:
    """Returns the columns of a role's prompt, chosen answer and rejected answer."""
    return f"{role}_prompt", f"{role}_chosen", f"{role}_rejected"


def answer_columns(role: str) -> tuple[str, str]:
    """Returns the columns of a role's chosen and rejected answers without their reasoning."""
    return f"{role}_chosen_answer", f"{role}_rejected_answer"


def ids_columns(role: str) -> tuple[str, str]:
    """Returns the columns of the token ids with which a role's chosen and rejected answers were sampled."""
    return f"{role}_chosen_token_ids", f"{role}_rejected_token_ids"


def columns_of(roles: Sequence[str]) -> list[str]:
    """Returns all columns about the answers of the roles."""
    own = [name for role in roles for columns in (text_columns, answer_columns, ids_columns) for name in columns(role)]
    return [*own, CHOSEN_REWARD, REJECTED_REWARD]


def roles_of_columns(columns: Sequence[str]) -> list[str]:
    """
    Returns the roles with a prompt, a chosen and a rejected answer among the columns, in the order of their prompts.
    """
    candidates = [name.removesuffix("_prompt") for name in columns if name.endswith("_prompt")]
    return [role for role in candidates if set(text_columns(role)) <= set(columns)]


def make_row(
    prompts: dict[str, str | Messages],
    chosen: dict[str, str],
    rejected: dict[str, str],
    chosen_reward: float,
    rejected_reward: float,
    **others: Any,
) -> PairRow:
    """
    Builds a row of the texts of each role. Where a prompt is a list of chat messages, the answers become messages,
    too.
    """
    row: PairRow = {}
    for role, prompt in prompts.items():
        answers: list[Any] = [chosen[role], rejected[role]]
        if not isinstance(prompt, str):
            answers = [as_messages(answer, "assistant") for answer in answers]
        row |= dict(zip(text_columns(role), (prompt, *answers), strict=True))
    return {**row, CHOSEN_REWARD: chosen_reward, REJECTED_REWARD: rejected_reward, **others}


@contextlib.contextmanager
def temporary_cache_files() -> Iterator[None]:
    """
    Makes datasets that are derived within the block use temporary cache files, because the folder of their source may
    be read-only.
    """
    was_enabled = is_caching_enabled()
    disable_caching()
    try:
        yield
    finally:
        if was_enabled:
            enable_caching()


def check_preferences(dataset: Dataset, roles: Sequence[str], name: str = "train_dataset") -> None:
    """
    Checks the columns and every row of a dataset of joint preferences.

    An answer may be empty, because an agent may answer with nothing but the end of its text. A chosen answer that is
    empty for all agents is an error.

    Args:
        dataset ([`~datasets.Dataset`]): The preferences.
        roles (`Sequence[str]`): The roles of the team.
        name (`str`, *optional*, defaults to `"train_dataset"`): Name of the dataset in messages.

    Raises:
        TypeError: `dataset` is not a `datasets.Dataset`.
        ValueError: The dataset has no rows, its columns do not fit the roles, or a row is malformed. The message names
            the row, counted from 0, and the column.
    """
    check_dataset(name, dataset)
    columns = dataset.column_names
    missing = [column for role in roles for column in text_columns(role) if column not in columns]
    present_roles = roles_of_columns(columns)
    if missing:
        raise ValueError(f"`{name}` has no column {', '.join(map(repr, missing))}; it has answers of {present_roles}.")
    if not roles:
        raise ValueError(f"`{name}` needs the columns 'ROLE_prompt', 'ROLE_chosen' and 'ROLE_rejected' of each role.")
    if not set(present_roles) <= set(roles):
        raise ValueError(f"`{name}` has answers of the roles {present_roles}, but the team has {list(roles)}.")
    if (CHOSEN_REWARD in columns) != (REJECTED_REWARD in columns):
        raise ValueError(f"`{name}` has only one of {CHOSEN_REWARD!r} and {REJECTED_REWARD!r}: give both or none.")
    if len(dataset) == 0:
        raise ValueError(f"`{name}` has no rows.")
    for index, row in enumerate(dataset):
        try:
            _check_row(row, roles)
        except ValueError as error:
            raise ValueError(f"Row {index} of `{name}`: {error}") from None


def _check_row(row: PairRow, roles: Sequence[str]) -> None:
    texts = []
    for role in roles:
        prompt, *completions = columns = text_columns(role)
        texts.append([text_of(row[column], column) for column in columns])
        for column in completions:
            answer = row[column]
            if isinstance(answer, str) != isinstance(row[prompt], str):
                raise ValueError(f"{column!r} and {prompt!r} must both be texts, or both be lists of chat messages.")
            if not isinstance(answer, str) and answer[0]["role"] != "assistant":
                raise ValueError(f"{column!r} begins with a message of {answer[0]['role']!r}, not 'assistant'.")
        check_prompt(row[prompt], repr(prompt))
        for column in answer_columns(role):
            if not isinstance(row.get(column), str | None):
                raise ValueError(f"{column!r} is {row[column]!r}; it must be a text.")
        for column in ids_columns(role):
            values = row.get(column) or []
            if not isinstance(values, list) or not all(isinstance(x, int) and x >= 0 for x in values):
                raise ValueError(f"{column!r} must be a list of token ids.")
    _, chosen, rejected = zip(*texts, strict=True)
    if not "".join(chosen).strip():
        raise ValueError("the chosen answer is empty.")
    if chosen == rejected:
        raise ValueError("the chosen and the rejected answers are the same.")
    if CHOSEN_REWARD not in row:
        return
    for column in (CHOSEN_REWARD, REJECTED_REWARD):
        if not isinstance(row[column], int | float) or not math.isfinite(row[column]):
            raise ValueError(f"{column!r} is {row[column]!r}; it must be a finite number.")
    if row[CHOSEN_REWARD] <= row[REJECTED_REWARD]:
        raise ValueError(f"{CHOSEN_REWARD!r} is {row[CHOSEN_REWARD]}, not more than {row[REJECTED_REWARD]}.")


def check_prompt(prompt: str | Messages, name: str) -> None:
    """
    Raises `ValueError` if a prompt is empty, or is chat messages that end with the assistant's. The message begins
    with `name`.
    """
    if not text_of(prompt, name):
        raise ValueError(f"{name} is empty.")
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise ValueError(f"{name} ends with a message of the assistant: end it with a message of the user.")


def text_of(value: Any, column: str) -> str:
    """Returns the text of a field, or the texts of its messages, one after the other."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"{column!r} is {value!r}; it must be a text or a list of chat messages.")
    for message in value:
        if not is_message(message):
            raise ValueError(f"{column!r} has the message {message!r}, which needs a text as 'role' and 'content'.")
    return "".join(message["content"] for message in value)

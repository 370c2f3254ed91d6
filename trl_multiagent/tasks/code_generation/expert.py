"""
The expert: another model that reads the problem and the team's program, and proposes edits of each agent's function.

Its prompt contains no tests and no results of tests. Each agent gets the edits of its own function only.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trl_multiagent.endpoints import (
    ANTHROPIC,
    CHARACTERS_PER_TOKEN,
    FIELDS,
    Answer,
    EndpointClient,
    EndpointSettings,
    Question,
    endpoint_section,
    make_endpoint,
)
from trl_multiagent.environments.base import Turn, as_messages
from trl_multiagent.environments.task import setting
from trl_multiagent.environments.task_errors import UnavailableError
from trl_multiagent.tasks.code_generation.reward import AUX, CodeResult


DEFAULT_MODEL = "deepseek-coder"
DEFAULT_TEMPERATURE = 0.3
# The keys of the fields of `EndpointSettings`
KEYS = {field: f"expert_{field}" for field in FIELDS if field != "top_p"} | {"key_env": "expert_api_key_env"}

ANSWERS = "_expert/answers"  # in the folder of the run; names with an underscore are not pushed
MAX_EDITS = 4000  # characters of the edits that an agent gets
MAX_TEXT = 2000  # characters of an agent's answer without code
MAX_ANSWER = 50_000  # characters of the expert's answer, its last ones
JSON = json.JSONDecoder(strict=False)  # strings may contain line breaks

Edits = dict[str, str]  # role -> what to change in its function


@dataclass
class ExpertSettings(endpoint_section(KEYS, own=("model", "temperature"))):  # type: ignore[misc]
    """The model that proposes edits with `external.mode: expert_edits`. Other modes ignore these settings."""

    expert_model: str | None = setting(
        "With expert_edits, the model that proposes edits: its name at a provider or at `expert_base_url`.",
        DEFAULT_MODEL,
    )
    expert_temperature: float | None = setting(
        f"Temperature of the expert; {DEFAULT_TEMPERATURE} by default, and the provider's own for Anthropic.",
        ge=0,
        le=2,
    )
    expert_cache_dir: str | None = setting("Folder of the answers, which runs may share; by default in the run's.")
    expert_on_failure: str = setting(
        "What happens without an answer: 'error' ends the run, 'plain' gives the agents the prompt of the mode plain.",
        "error",
        choices=("error", "plain"),
    )

    def expert_endpoint(self) -> EndpointSettings:
        """
        Makes the endpoint to ask. Raises `ValueError` if a setting is impossible, or it is not known where the model
        is.
        """
        if self.expert_model is None:
            raise ValueError("`external.mode: expert_edits` needs `external.expert_model`, which proposes edits.")
        given = {field: getattr(self, key) for field, key in KEYS.items()}
        endpoint = make_endpoint(**given, called=lambda field: f"external.{KEYS[field]}")
        if endpoint.temperature is None and endpoint.api != ANTHROPIC:
            return replace(endpoint, temperature=DEFAULT_TEMPERATURE)
        return endpoint


class Expert:
    """
    Gets edits for whole turns from a model, for the agents of some roles, handles failures as the settings require,
    and counts requests. Impossible settings are a `ValueError`.
    """

    def __init__(self, settings: ExpertSettings, roles: Sequence[str], run_folder: Path):
        folder = run_folder / ANSWERS if settings.expert_cache_dir is None else Path(settings.expert_cache_dir)
        self.settings, self.roles = settings, tuple(roles)
        self.client = EndpointClient(settings.expert_endpoint(), folder)
        self.missing_parts = 0

    def prepare(self) -> None:
        """Checks that the endpoint can be used. Raises `UnavailableError` if not."""
        problem = self.client.endpoint.problem()
        if problem is not None:
            raise UnavailableError(f"`external.mode: expert_edits` cannot use the expert: {problem}.")

    def propose(self, items: Sequence[dict], turns: Sequence[Turn]) -> list[Edits]:
        """
        Gets edits for the answers in the last turns of many branches at once: for each branch, by role. Roles without
        edits are missing. Raises [`UnavailableError`] if there is no answer, and `expert_on_failure` is not `"plain"`.
        """
        texts = [expert_question(*x, self.roles) for x in zip(items, turns, strict=True)]
        asked = [Question(tuple(as_messages(text))) for text in texts]
        stops = self.settings.expert_on_failure == "error"
        answers = self.client.ask(asked, stop_at_failure=stops)
        failures = [answer for answer in answers if isinstance(answer, Exception)]
        if failures and stops:
            raise UnavailableError(
                f"The expert proposed no edits for {len(failures)} of {len(answers)} answers: {failures[0]}. "
                "Solve this and continue the run from its last checkpoint, or set `external.expert_on_failure: plain`."
            )
        edits = [
            parse_edits(answer.text, self.roles, item) if isinstance(answer, Answer) else {}
            for item, answer in zip(items, answers, strict=True)
        ]
        self.missing_parts += (len(answers) - len(failures)) * len(self.roles) - sum(map(len, edits))
        return edits

    def metrics(self) -> dict[str, float]:
        """Numbers since the last call of this method."""
        numbers = {**vars(self.client.take_usage()), "missing_parts": self.missing_parts}
        self.missing_parts = 0
        return {f"expert/{name}": float(value) for name, value in numbers.items()}

    def plan(self, items: Sequence[dict], requests: int, answer_tokens: int) -> str:
        """
        Describes the largest number of requests and their tokens. Sends nothing. Of the items, which may be none, the
        longest counts. `answer_tokens`: tokens of one agent's answer at most.
        """
        questions = (question_text(item, item["prompt"], {}, self.roles) for item in items)
        question = max(map(len, questions), default=0) // CHARACTERS_PER_TOKEN
        input_tokens = requests * (question + len(self.roles) * answer_tokens)
        output_tokens = requests * self.settings.expert_max_tokens
        endpoint = self.client.endpoint
        problem = endpoint.problem()
        return (
            f"{self.settings.expert_model}, {requests} requests with about {input_tokens} prompt tokens and "
            f"{output_tokens} answer tokens at most, at {endpoint.base_url}{f' ({problem})' if problem else ''}"
        )


# Questions and answers


def expert_question(item: dict, turn: Turn, roles: Sequence[str]) -> str:
    """
    Returns the prompt of the expert about a team's answers in the last turn. The turn's outcome has the
    [`CodeResult`] as `info`.
    """
    result: CodeResult = turn.outcome.info
    missing = {
        name: turn.joint_action[role]
        for role in roles
        if (name := function_of(role, item)) in result.analysis.without_code
    }
    return question_text(item, result.analysis.source, missing, roles)


def function_of(role: str, item: dict) -> str:
    """Returns the name of an agent's function."""
    return AUX if role == AUX else item["entry_point"]


def question_text(item: dict, source: str, missing: Mapping[str, str], roles: Sequence[str]) -> str:
    """
    Returns the text of a question, see [`expert_question`]. `missing`: answers without code, by the name of the
    missing function.
    """
    entry_point = item["entry_point"]
    team = f"A programmer solves a problem with the function `{entry_point}`."
    if AUX in roles:
        team = (
            "Two programmers solve a problem together: one writes the helper function `aux`, the other writes "
            f"`{entry_point}`, which should use it. They cannot see each other's code."
        )
    parts = [
        team,
        f"The problem:\n\n{item['prompt'].strip()}",
        f"The program so far:\n\n{source.strip() or '(nothing)'}",
    ]
    parts += [
        f"For `{name}` there is no code, but this answer:\n\n{shorten(text.strip(), MAX_TEXT) or '(nothing)'}"
        for name, text in missing.items()
    ]
    form = ", ".join(f'"{role}": "what to change in `{function_of(role, item)}`"' for role in roles)
    parts.append(
        "Propose edits, short and concrete, so that the program becomes correct. Every programmer only sees "
        f"the edits of the own function. Answer with one JSON object and nothing else:\n\n{{{form}}}"
    )
    return "\n\n".join(parts) + "\n"


def parse_edits(text: str, roles: Sequence[str], item: dict) -> Edits:
    """
    Reads the edits of an answer, by role. They are in the last JSON object that has one of the roles, anywhere in the
    text after a reasoning. Roles without edits are missing. `main` may also be called by the entry point's name.
    """
    from trl_multiagent.models.reasoning import split_reasoning  # `rewards` does without transformers

    edits: Edits = {}
    text = split_reasoning(text)[1][-MAX_ANSWER:]
    for match in re.finditer(r"\{", text):
        with contextlib.suppress(ValueError, RecursionError):
            values, _ = JSON.raw_decode(text, match.start())
            parts = {role: values.get(role, values.get(function_of(role, item))) for role in roles}
            given = {role: part.strip() for role, part in parts.items() if isinstance(part, str)}
            edits = {role: shorten(part, MAX_EDITS) for role, part in given.items() if part} or edits
    return edits


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."

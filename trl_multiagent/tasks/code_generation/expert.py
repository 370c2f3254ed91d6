"""
The expert: another model that reads the problem and the team's program, and proposes edits of each agent's function.

Its prompt contains no tests and no results of tests. Each agent gets the edits of its own function only.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_multiagent.code.dependencies import PARSE_ERRORS
from trl_multiagent.endpoints.client import CHARACTERS_PER_TOKEN, EndpointClient, Usage
from trl_multiagent.endpoints.endpoint import describe_endpoint, describe_requests
from trl_multiagent.endpoints.files import Answer, Question
from trl_multiagent.environments.base import Turn
from trl_multiagent.environments.task_errors import UnavailableError, describe
from trl_multiagent.tasks.code_generation.expert_settings import DEFAULT_TEMPERATURE, ExpertSettings
from trl_multiagent.tasks.code_generation.prompts import AUX
from trl_multiagent.tasks.code_generation.reward import CodeResult


if TYPE_CHECKING:
    from trl_multiagent.rollout.sampler import TeamSampler


FOLDER = "_expert"  # in the folder of the run; names with an underscore are not pushed
MAX_EDITS = 4000  # characters of the edits that an agent gets
MAX_TEXT = 2000  # characters of an agent's answer without code
MAX_ANSWER = 50_000  # characters of the expert's answer, its last ones
MAX_DEPTH = 3  # of lists and objects in place of a text
SOLO = "expert"  # the role of a model that proposes edits for all agents

Edits = dict[str, str]  # role -> what to change in its function


class Expert:
    """
    Gets edits for whole turns from a model, for the agents of some roles, handles failures as the settings require,
    and counts requests. Impossible settings are a `ValueError`.
    """

    def __init__(self, settings: ExpertSettings, roles: Sequence[str], run_folder: Path):
        settings.check_expert()
        self.settings, self.roles = settings, tuple(roles)
        is_local = settings.expert_is_local
        self.source = LocalExpert(settings) if is_local else EndpointExpert(settings, run_folder / FOLDER)
        self.missing_parts = self.total_tokens = 0
        self.total_cost = 0.0

    def propose(self, items: Sequence[dict], turns: Sequence[Turn]) -> list[Edits]:
        """
        Gets edits for the answers in the last turns of many branches at once: for each branch, by role. Roles without
        edits are missing. Raises [`UnavailableError`] if there is no answer, and `expert_on_failure` is not `"plain"`.
        """
        proposals = self.source.propose(items, turns, self.roles)
        failures = [proposal for proposal in proposals if isinstance(proposal, Exception)]
        if failures and self.settings.expert_on_failure == "error":
            raise UnavailableError(
                f"The expert proposed no edits for {len(failures)} of {len(proposals)} answers: {failures[0]}. "
                "Solve this "
                "and continue the run from its last checkpoint, or set `external.expert_on_failure: plain`."
            )
        edits = [{} if isinstance(proposal, Exception) else proposal for proposal in proposals]
        answered = len(proposals) - len(failures)
        self.missing_parts += answered * len(self.roles) - sum(map(len, edits))
        return edits

    def metrics(self) -> dict[str, float]:
        """Numbers since the last call of this method, and the tokens and the cost since the start."""
        used = self.source.take_usage()
        self.total_tokens += used.input_tokens + used.output_tokens
        self.total_cost += used.cost
        numbers = {**vars(used), "missing_parts": self.missing_parts, "total_tokens": self.total_tokens}
        if self.settings.expert_input_price is None and self.settings.expert_output_price is None:
            del numbers["cost"]
        else:
            numbers["total_cost"] = self.total_cost
        self.missing_parts = 0
        return {f"expert/{name}": float(value) for name, value in numbers.items()}

    def plan(self, items: Sequence[dict], requests: int, answer_tokens: int) -> str:
        """
        Describes the largest cost of some requests. Sends nothing. Of the items, which may be none, the longest
        counts. `answer_tokens`: tokens of one agent's answer at most.
        """
        questions = (question_text(item, item["prompt"], {}, self.roles) for item in items)
        question = max(map(len, questions), default=0) // CHARACTERS_PER_TOKEN
        tokens = requests * (question + len(self.roles) * answer_tokens), requests * self.settings.expert_max_tokens
        endpoint = None if self.settings.expert_is_local else self.settings.expert_endpoint()
        return f"{self.settings.expert_model}, {describe_requests(endpoint, requests, *tokens)}"


class EndpointExpert:
    """
    An expert at an endpoint, which answers about all agents at once, in JSON. `folder`: for the tokens that are used,
    and for answers.
    """

    def __init__(self, settings: ExpertSettings, folder: Path):
        cache = settings.expert_cache_dir
        self.client = EndpointClient(settings.expert_endpoint(), folder, None if cache is None else Path(cache))
        self.take_usage = self.client.take_usage
        self.stops = settings.expert_on_failure == "error"

    def prepare(self) -> None:
        """Checks that the endpoint can be used. Raises `UnavailableError` if not."""
        problem = self.client.endpoint.problem()
        if problem is not None:
            raise UnavailableError(f"`external.mode: expert_edits` cannot use the expert: {problem}.")

    def describe(self) -> dict[str, Any]:
        """Returns what the edits depend on, as plain values."""
        return describe_endpoint(self.client.endpoint)

    def propose(self, items: Sequence[dict], turns: Sequence[Turn], roles: Sequence[str]) -> list[Edits | Exception]:
        """Returns the edits for each team's last answers, or why there are none."""
        questions = [
            Question(({"role": "user", "content": expert_question(item, turn, roles)},))
            for item, turn in zip(items, turns, strict=True)
        ]
        answers = self.client.ask(questions, stop_at_failure=self.stops)
        return [
            parse_edits(answer.text, roles, item["entry_point"]) if isinstance(answer, Answer) else answer
            for item, answer in zip(items, answers, strict=True)
        ]


class LocalExpert:
    """
    An expert on this machine, sampled with transformers: a model, which answers about all agents at once in JSON, or a
    saved team with the same roles, each agent of which proposes edits for one. The methods are those of
    [`EndpointExpert`].
    """

    def __init__(self, settings: ExpertSettings):
        self.model = settings.expert_model
        temperature = DEFAULT_TEMPERATURE if settings.expert_temperature is None else settings.expert_temperature
        self.sampling = {"temperature": temperature, "max_tokens": settings.expert_max_tokens}
        self.usage = Usage()
        self.sampler: TeamSampler | None = None  # loaded before the first question

    def take_usage(self) -> Usage:
        usage, self.usage = self.usage, Usage()
        return usage

    def describe(self) -> dict[str, Any]:
        return {"model": self.model, **self.sampling}

    def prepare(self) -> None:
        """Loads the model. Raises `UnavailableError` if that is not possible."""
        if self.sampler is not None:
            return
        from accelerate import PartialState
        from transformers.integrations import is_deepspeed_zero3_enabled

        from trl_multiagent.rollout.sampler import TeamSampler, TransformersGenerator, sampling_arguments
        from trl_multiagent.team.load import load_player

        assert self.model is not None
        if is_deepspeed_zero3_enabled():
            raise UnavailableError(
                f"Under ZeRO-3, the expert {self.model!r} would be loaded in parts: serve it, and set "
                "`external.expert_base_url`."
            )
        try:
            team = load_player(self.model, [SOLO], dtype="auto")
        except (OSError, ValueError, ImportError, TypeError) as error:
            reason = describe(error)
            raise UnavailableError(f"`external.expert_model` {self.model!r} cannot be loaded: {reason}") from error
        team = team.requires_grad_(False).eval().to(str(PartialState().device))
        limit = {"temperature": self.sampling["temperature"], "max_new_tokens": self.sampling["max_tokens"]}
        self.sampler = TeamSampler(team, TransformersGenerator(team, sampling_arguments(limit), 65536, seed=0))

    def propose(self, items: Sequence[dict], turns: Sequence[Turn], roles: Sequence[str]) -> list[Edits | Exception]:
        from trl_multiagent.rollout.episodes import derive_seed
        from trl_multiagent.rollout.tree import Node

        self.prepare()
        assert self.sampler is not None
        asked = self.sampler.team.roles
        is_team = len(asked) > 1
        if is_team and set(asked) != set(roles):
            raise UnavailableError(
                f"`external.expert_model` is a team with the roles {', '.join(asked)}, but edits are for "
                f"{', '.join(roles)}."
            )
        nodes = []
        for item, turn in zip(items, turns, strict=True):
            prompts = {role: expert_question(item, turn, roles, only=role if is_team else None) for role in asked}
            # As with an endpoint, whose answers are kept, a question has one answer
            nodes.append(Node(item, (), {**prompts}, tree=derive_seed(*prompts.values())))
        samples = self.sampler(nodes, 1)
        for of_role in samples.values():
            self.usage.requests += len(of_role)
            self.usage.input_tokens += sum(len(sample.prompt_ids) for sample in of_role)
            self.usage.output_tokens += sum(len(sample.completion_ids[0]) for sample in of_role)
        answers = [{role: samples[role][k].texts[0].strip() for role in asked} for k in range(len(nodes))]
        if is_team:
            return [{role: shorten(text, MAX_EDITS) for role, text in one.items() if text} for one in answers]
        return [
            parse_edits(one[asked[0]], roles, item["entry_point"]) for item, one in zip(items, answers, strict=True)
        ]


# Questions and answers


def expert_question(item: dict, turn: Turn, roles: Sequence[str], only: str | None = None) -> str:
    """
    Returns the prompt of the expert about a team's answers in the last turn, whose outcome has the [`CodeResult`] as
    `info`. With `only`, a role, it asks about the function of this role alone, and for text in place of JSON.
    """
    result: CodeResult = turn.outcome.info
    missing = {
        name: turn.joint_action[role]
        for role, name in function_names(item["entry_point"], roles).items()
        if name in result.analysis.without_code
    }
    return question_text(item, result.analysis.source, missing, roles, only)


def function_names(entry_point: str, roles: Sequence[str]) -> dict[str, str]:
    """Returns the name of each role's function."""
    return {role: AUX if role == AUX else entry_point for role in roles}


def question_text(
    item: dict, source: str, missing: Mapping[str, str], roles: Sequence[str], only: str | None = None
) -> str:
    """
    Returns the text of a question, see [`expert_question`]. `missing`: answers without code, by the name of the
    missing function.
    """
    entry_point = item["entry_point"]
    names = function_names(entry_point, roles)
    team = f"A programmer solves a problem with the function `{entry_point}`."
    if AUX in roles:
        team = (
            "Two programmers solve a problem together: one writes the helper function `aux`, the other writes "
            f"`{entry_point}`, which "
            "should use it. They cannot see each other's code."
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
    if only is not None:
        parts.append(f"Say in short what to change in `{names[only]}`, so that the program becomes correct:")
    else:
        form = ", ".join(f'"{role}": "what to change in `{name}`"' for role, name in names.items())
        parts.append(
            "Propose edits, short and concrete, so that the program becomes correct. Every programmer only sees "
            "the edits of the own "
            f"function. Answer with one JSON object and nothing else:\n\n{{{form}}}"
        )
    return "\n\n".join(parts) + "\n"


def parse_edits(text: str, roles: Sequence[str], entry_point: str) -> Edits:
    """
    Reads the edits of an answer, by role, without the roles for which there are none: those of the last JSON object
    that has most of the roles, wherever it stands in the text. `main` may also be called by the entry point's name.
    Strings of an object that was cut off are read, too.
    """
    best: Edits = {}
    for values in _objects_in(text[-MAX_ANSWER:]):
        given = {str(key).strip().lower(): _as_text(value) for key, value in values.items()}
        edits = {
            role: shorten(part, MAX_EDITS)
            for role, name in function_names(entry_point, roles).items()
            if (part := given.get(role) or given.get(name.lower()))
        }
        if edits and len(edits) >= len(best):
            best = edits
    return best


def _objects_in(text: str) -> Iterator[dict]:
    """
    Yields the JSON objects in a text, in order. Without any, a Python dict, or the strings of an object that was cut
    off.
    """
    decoder = json.JSONDecoder(strict=False)  # strings may contain line breaks
    found = []
    for match in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        found += [value] if value else []
    if found:
        yield from found
        return
    try:
        value = ast.literal_eval(text[text.find("{") : text.rfind("}") + 1])
    except (*PARSE_ERRORS, TypeError):
        value = None
    if isinstance(value, dict):
        yield value
        return
    strings = re.findall(r'"(\w+)"\s*:\s*"((?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)"', text)
    yield {name: decoder.decode(f'"{quoted}"') for name, quoted in strings}


def _as_text(value: Any, depth: int = 0) -> str:
    """
    Returns the text of a JSON value: of a list, its entries, one per line; of an object, its values. Other values are
    no edits.
    """
    if isinstance(value, str):
        # JSON can hold halves of characters, which no tokenizer and no file takes
        return value.encode("utf-8", "replace").decode("utf-8").strip()
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list) or depth == MAX_DEPTH:
        return ""
    return "\n".join(filter(None, (_as_text(entry, depth + 1) for entry in value)))


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."

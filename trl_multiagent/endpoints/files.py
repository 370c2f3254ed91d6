"""
Files of an endpoint: a cache, so that no answer is paid for twice, and a count of used tokens, so that a budget holds
across restarts.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


USAGE_FILE = "usage.jsonl"


@dataclass(frozen=True)
class Question:
    """A request to a model."""

    messages: tuple[dict[str, str], ...]  # chat messages with `role` and `content`; the first may be a system message
    sample: str = ""  # distinguishes questions with the same messages that need different answers

    @property
    def num_characters(self) -> int:
        return sum(len(message["content"]) for message in self.messages)

    def key(self, parameters: dict[str, Any]) -> str:
        """Returns the name of the answer in the cache. It depends on the messages, the parameters and the sample."""
        parts = [list(self.messages), parameters, self.sample]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Answer:
    """The answer of a model. `truncated`: it ended because it had `max_tokens` tokens."""

    text: str
    input_tokens: int
    output_tokens: int
    truncated: bool = False


class AnswerCache:
    """Answers in files of a folder, which several processes may use at the same time."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def read(self, key: str) -> Answer | None:
        """Returns the answer with this key; `None` if there is none, or if its file is damaged."""
        try:
            values = json.loads(self.path(key).read_text(encoding="utf-8"))
            answer = Answer(**values)
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return answer if isinstance(answer.text, str) else None

    def write(self, key: str, answer: Answer) -> None:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(answer), file)
        os.replace(unfinished, path)


class Ledger:
    """
    The tokens of all requests so far, one line per answer. All processes append to the same file in the folder, and a
    resumed run continues it, so a budget holds for the whole run.
    """

    def __init__(self, folder: Path):
        self.path = folder / USAGE_FILE
        self.input_tokens = self.output_tokens = self.requests = 0
        self._read = 0  # bytes of the file that are in these numbers

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def update(self) -> None:
        """Reads what was added to the file, by any process."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        complete = added[: added.rfind(b"\n") + 1]
        self._read += len(complete)
        for line in complete.splitlines():
            with contextlib.suppress(ValueError):  # a damaged line; on an unfinished one, the next entry follows
                input_tokens, output_tokens = json.loads(line[line.rfind(b"[") :])
                self.input_tokens += input_tokens
                self.output_tokens += output_tokens
                self.requests += 1

    def add(self, input_tokens: int, output_tokens: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps([input_tokens, output_tokens]) + "\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)  # only the user may read it
        with open(handle, "ab", buffering=0) as file:  # one write, so that lines of several processes do not mix
            file.write(line.encode())
        self.update()

"""The transcripts of an evaluation: one line of JSON per episode. All numbers are computed from them."""

import json
import os
from pathlib import Path
from typing import Any

from trl_multiagent.files import naming, unfinished_path, write_text


TRANSCRIPTS = "transcripts.jsonl"  # all episodes, in order, once they are complete
PART = "transcripts_{}.jsonl"  # those of one process, in the order in which they were played
SETTINGS_FILE = "settings.json"


class Transcripts:
    """
    The transcripts of one policy, in a folder of their own.

    Args:
        folder (`Path`): The folder.
        num_items (`int`): Number of items.
        num_episodes (`int`): Episodes per item.
    """

    def __init__(self, folder: Path, num_items: int, num_episodes: int):
        self.folder, self.num_items, self.num_episodes = folder, num_items, num_episodes

    def prepare(self, settings: dict[str, Any]) -> None:
        """
        Makes the folder, or checks that what it holds belongs to the same evaluation. The last line of a file is removed
        if it was written in part only.

        Raises:
            ValueError: the folder holds something else.
        """
        path = self.folder / SETTINGS_FILE
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file: choose another folder for the evaluation.")
        settings = json.loads(json.dumps(settings, default=str))
        if not path.is_file():
            if self.folder.is_dir() and {*self.folder.iterdir()} - {unfinished_path(path)}:
                raise ValueError(f"{self.folder} holds other files: choose another folder for the evaluation.")
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(settings, indent=2) + "\n")
            return
        saved = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name in {**saved, **settings} if saved.get(name) != settings.get(name)]
        if changed:
            changes = "; ".join(f"{name} was {saved.get(name)}, is {settings.get(name)}" for name in changed)
            raise ValueError(
                f"{self.folder} holds transcripts of another evaluation: {changes}. Choose another folder, or remove this one."
            )
        for part in self.folder.glob(PART.format("*")):
            _drop_partial_line(part)

    def append(self, process: int, records: list[dict[str, Any]]) -> None:
        """Adds episodes that a process has played, and waits until they are on the disk."""
        path = self.folder / PART.format(process)
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> dict[tuple[int, int], dict[str, Any]]:
        """
        Reads the episodes that are there, by item and episode.

        Raises:
            ValueError: a line is damaged.
        """
        records = {}
        for path in sorted(self.folder.glob("transcripts*.jsonl")):
            for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
                if not line:
                    continue
                try:
                    record = json.loads(line)
                    records[record["item"], record["episode"]] = record
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{path}, line {number} is damaged: {error!r}. Remove the line, and start the evaluation again."
                    ) from None
        return records

    def finish(self) -> list[dict[str, Any]]:
        """
        Joins the files of all processes into one, in the order of the items, and returns the episodes.

        Raises:
            ValueError: episodes are missing.
        """
        records = self.read()
        keys = [(item, episode) for item in range(self.num_items) for episode in range(self.num_episodes)]
        missing = [key for key in keys if key not in records]
        if missing:
            raise ValueError(
                f"{self.folder} lacks {len(missing)} of {len(keys)} episodes, the first of item {missing[0][0]}: with several "
                "processes, the folder must be on a file system that all of them share."
            )
        parts = list(self.folder.glob(PART.format("*")))
        if parts:
            write_text(self.folder / TRANSCRIPTS, "".join(json.dumps(records[key]) + "\n" for key in keys))
            for part in parts:
                part.unlink()
        return [records[key] for key in keys]


def count_episodes(folder: Path) -> int:
    """Number of complete lines in the transcripts of a folder."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("transcripts*.jsonl"))


def _drop_partial_line(path: Path) -> None:
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)

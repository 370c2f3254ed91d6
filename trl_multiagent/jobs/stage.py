"""A resumable job."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from tqdm.auto import tqdm

from trl_multiagent.folders import locked, naming_damage, read_json, write_json, write_lines
from trl_multiagent.jobs.distributed import check_agreement, fail_together


MANIFEST = "stage.json"  # in the folder of a stage, written first


@dataclass(eq=False)
class Stage:
    """
    Resumable work in a folder of its own. The manifest, which is written first, holds the settings that the work
    depends on. Parts of the work are files that are written atomically, so a killed run repeats at most one part. The
    work is complete when its last part exists.

    All processes make a stage with the same settings. Each process saves its own parts; the main process writes the
    manifest.

    Args:
        folder (`Path`): The folder, which all processes can reach.
        name (`str`): Name of the result in messages, such as `"collection"`.
        settings (`Mapping[str, Any]`): Settings that must be the same when the work is resumed.
        state ([`~accelerate.PartialState`] or [`~accelerate.Accelerator`]): The connected processes.
        free (`Collection[str]`, *optional*): Settings that may change.
        advice (`str`, *optional*): What to do if the folder cannot be used, for messages.
    """

    folder: Path
    name: str
    settings: dict[str, Any]
    state: PartialState | Accelerator
    free: Collection[str] = ()
    advice: str = "choose another folder"

    def __post_init__(self) -> None:
        self.settings = json.loads(json.dumps(self.settings, default=str))

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """
        Locks the folder, compares its manifest with this work, and writes the manifest. Parts can be saved within the
        block. Raises `ValueError` if the folder holds other work or files, or another program is
        writing to it, or the processes have different settings.
        """
        check_agreement(self.settings)
        with contextlib.ExitStack() as stack:
            with fail_together(self.state):
                if self.state.is_main_process:
                    stack.enter_context(locked(self.folder, self.advice))
                    where = "**/" if (self.folder / MANIFEST).is_file() else ""  # else, folders are somebody else's
                    for path in self.folder.glob(where + "_*_unfinished"):  # of a process that was killed
                        path.unlink()
                    if any(self.folder.iterdir()):
                        self.check()
                    self.begin()
            yield

    def check(self) -> None:
        """
        Compares the manifest in the folder with this work. Raises `ValueError` if they differ, or there is no
        manifest.
        """
        path = self.folder / MANIFEST
        if not path.is_file():
            raise ValueError(f"{self.folder} holds other files: {self.advice}.")
        saved = read_json(path)
        old, new = {"stage": saved["stage"], **saved["settings"]}, {"stage": self.name, **self.settings}
        changes = [
            f"{name} was {old.get(name, 'not set')}, is {new.get(name, 'not set')}"
            for name in {**old, **new}
            if old.get(name) != new.get(name) and name not in self.free
        ]
        if changes:
            advice = f"{self.advice[0].upper()}{self.advice[1:]}, or remove this one."
            raise ValueError(f"{self.folder} holds another {self.name}: {'; '.join(changes)}. {advice}")

    def begin(self) -> None:
        """Writes the manifest. Only the main process may call this, while it holds the lock of the folder."""
        write_json(self.folder / MANIFEST, {"stage": self.name, "settings": self.settings})

    def has(self, part: str) -> bool:
        """Returns whether a part is complete."""
        return (self.folder / part).is_file()

    def save(self, part: str, records: Sequence[dict[str, Any]]) -> None:
        """Writes a part of this process, one line of JSON per record."""
        write_lines(self.folder / part, records)

    def read(self, part: str) -> list[dict[str, Any]]:
        """Reads the records of a part of any process. Raises `ValueError` if the part is missing or damaged."""
        path = self.folder / part
        if not path.is_file():
            raise ValueError(f"{path} is missing: several processes need a folder that all of them share.")
        with naming_damage(path):
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def save_result(self, part: str, value: Any) -> None:
        """Writes a shared result as JSON. Collective."""
        self.state.wait_for_everyone()
        with fail_together(self.state):
            if self.state.is_main_process:
                write_json(self.folder / part, value)


class Chunks:
    """
    The items of a stage, played in chunks that do not depend on the number of processes, each by one process. A chunk
    that was interrupted is played again as a whole.

    Args:
        stage ([`Stage`]): Holds a part per chunk.
        num_items (`int`): Number of items.
        size (`int`): Most items of a chunk.
        part (`str`): Template of the names of the parts, of the chunk's number and its items.
    """

    def __init__(self, stage: Stage, num_items: int, size: int, part: str):
        self.stage, self.part = stage, part
        self.items = [range(k, min(k + size, num_items)) for k in range(0, num_items, size)]
        self.own = range(stage.state.process_index, len(self.items), stage.state.num_processes)

    def part_of(self, chunk: int) -> str:
        return self.part.format(chunk, self.items[chunk])

    def missing(self) -> list[int]:
        """Returns the chunks that this process has to play."""
        return [chunk for chunk in self.own if not self.stage.has(self.part_of(chunk))]

    def play(self, text: str, play: Callable[[int], list[dict[str, Any]]], silent: bool) -> None:
        """Plays the missing chunks of this process, and saves the records of each. `text`: of the progress bar."""
        missing = self.missing()
        total, left = (sum(len(self.items[chunk]) for chunk in chunks) for chunks in (self.own, missing))
        silent = silent or not self.stage.state.is_main_process
        with tqdm(desc=text, unit=" items", total=total, initial=total - left, disable=silent) as bar:
            for chunk in missing:
                self.stage.save(self.part_of(chunk), play(chunk))
                bar.update(len(self.items[chunk]))

    def read(self) -> list[dict[str, Any]]:
        """Reads the records of all chunks."""
        return [record for chunk in range(len(self.items)) for record in self.stage.read(self.part_of(chunk))]

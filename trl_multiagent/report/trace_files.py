"""The trace of a run: the rows of [`rollout.trace`] in files."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from trl_multiagent.folders import replacing
from trl_multiagent.rollout.trace import TraceRow
from trl_multiagent.rollout.tree import RolloutCallback, Trees


TRACE_FOLDER = "trace"
NAME = re.compile(r"(\d+)-(\d+)_process(\d+)(?:_part\d+)?\.parquet")


class Trace(RolloutCallback):
    """Writes the rows of all trees, also of those in evaluations, to the folder `trace` of the run."""

    def __init__(self, args: Any):
        self.args, self.folder = args, Path(args.output_dir) / TRACE_FOLDER
        self.rows: list[TraceRow] = []  # not written yet
        self.steps: list[int] = []  # in which they were sampled
        self.is_training = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_training = True
        if args.should_save:  # a resumed run repeats the steps after its checkpoint
            remove_after(self.folder, state.global_step)

    def on_rollout(self, args: Any, state: Any, split: str, turns: Trees, rows: Callable[[], list[TraceRow]]) -> None:
        self.rows += rows()
        self.steps.append(state.global_step + (split == "train"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.trace_steps == 0:
            self.on_checkpoint()

    def on_checkpoint(self) -> None:
        write_rows(self.folder, self.args, self.rows, self.steps)
        self.rows, self.steps = [], []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "total_flos" in logs:  # the last log of a training
            self.is_training = False
            self.on_checkpoint()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if not self.is_training:
            self.on_checkpoint()

    on_predict = on_evaluate


def write_rows(folder: Path, args: Any, rows: list[TraceRow], steps: list[int] | None = None) -> None:
    """
    Writes rows of some steps to a file of this process in a folder that all processes share, and deletes the oldest
    files of this process above `args.trace_max_files`. A file is complete as soon as it exists.
    """
    if not rows:
        return
    folder.mkdir(parents=True, exist_ok=True)
    steps = steps or [row["step"] for row in rows]
    name = f"{min(steps):08d}-{max(steps):08d}_process{args.process_index}"
    path, part = folder / f"{name}.parquet", 1
    while path.exists():  # for example from an evaluation after the same step
        part += 1
        path = folder / f"{name}_part{part}.parquet"
    with replacing(path) as file:
        as_frame(rows).to_parquet(file, index=False)
    own = [path for path in trace_files(folder) if steps_and_process(path)[2] == args.process_index]
    for old in own[: -args.trace_max_files]:
        old.unlink()


def remove_after(folder: Path, step: int) -> None:
    """Deletes unfinished files, and the files of all processes with rows after a step."""
    late = [path for path in trace_files(folder) if steps_and_process(path)[1] > step]
    for path in [*late, *folder.glob("_*_unfinished")]:
        with contextlib.suppress(FileNotFoundError):  # another host that shares the folder may have deleted the file
            path.unlink()


def trace_files(folder: Path) -> list[Path]:
    """Returns the files of a trace, oldest steps first."""
    # The number of a process has no fixed width
    return sorted((path for path in folder.glob("*") if NAME.fullmatch(path.name)), key=steps_and_process)


def read_trace(folder: str | Path) -> pd.DataFrame:
    """Reads the whole trace of a run: one row per joint action, in the order of the steps."""
    frames = [pd.read_parquet(path) for path in trace_files(Path(folder))]
    if not frames:
        raise FileNotFoundError(f"{folder} contains no trace: set `trace_steps` in the configuration of the run.")
    return pd.concat(frames, ignore_index=True).sort_values("step", kind="stable", ignore_index=True)


def as_frame(rows: list[TraceRow]) -> pd.DataFrame:
    """Makes a table in which each column has one type, the same in every file."""
    frame = pd.DataFrame(rows)
    for name in frame:
        if name.startswith(("advantage/", "metrics/")):
            frame[name] = frame[name].astype(float)
        elif name.startswith("extra/") and len({type(x) for x in frame[name].dropna()}) > 1:
            frame[name] = [None if pd.isna(x) else str(x) for x in frame[name]]
    return frame


def steps_and_process(path: Path) -> tuple[int, ...]:
    """Returns the first step, the last step and the process of a file."""
    return tuple(map(int, NAME.findall(path.name)[0]))

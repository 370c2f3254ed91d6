"""
Runs one optimizer step and one evaluation of the task that `trl-multiagent init` writes under a profiler, and prints
the files of the package that they enter, in order, with the number of calls of their functions. What a file runs when
it is imported does not count.

    python scripts/ways.py
"""

import contextlib
import dataclasses
import importlib
import inspect
import io
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback

import trl_multiagent
from trl_multiagent.new_task import write_task
from trl_multiagent.runs.evaluation import run_evaluation
from trl_multiagent.runs.run import run_recipe


PACKAGE = Path(trl_multiagent.__file__).parent
MEASURED_STEP = 2  # the first one also fills caches


class Way:
    """Counts the calls of the package's functions in this thread."""

    def __init__(self) -> None:
        self.calls = Counter[str]()  # by file, in the order in which they were entered
        self.imports = 0  # modules that are being imported

    def __enter__(self) -> "Way":
        sys.setprofile(self.profile)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return"):
            return
        if code.co_name == "<module>":
            self.imports = max(0, self.imports + (1 if event == "call" else -1))
        elif event == "call" and not self.imports and code.co_flags & inspect.CO_OPTIMIZED:
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE):
                self.calls[str(path.relative_to(PACKAGE))] += 1

    def show(self, title: str) -> None:
        print(f"\n{title}: {len(self.calls)} files")
        for file, number in self.calls.items():
            print(f"{number:8d}  {file}")


class MeasureStep(TrainerCallback):
    """Measures a step, and ends the training after it."""

    def __init__(self, way: Way):
        self.way = way

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == MEASURED_STEP:
            self.way.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == MEASURED_STEP:
            self.way.__exit__()
            control.should_training_stop = True


def main() -> None:
    step, evaluation = Way(), Way()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        _, config = write_task(folder)
        config.write_text(config.read_text().replace("task: task:TASK\n", ""))  # its task is handed over
        sys.path.insert(0, folder)
        own = importlib.import_module("task").TASK
        task = dataclasses.replace(own, callbacks=lambda settings, trainer: [MeasureStep(step)])
        team = f"{folder}/team"
        run_recipe("magrpo", task, ["--config", str(config), "--override", f"output.save_path={team}"])
        with evaluation:
            run_evaluation(
                own, [team, "--config", str(config), "--num_episodes", "2", "--output_dir", f"{folder}/played"]
            )
    step.show("One optimizer step")
    evaluation.show("An evaluation")


if __name__ == "__main__":
    main()

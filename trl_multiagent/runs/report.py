"""Runs `trl-multiagent report`: the page of a run or an evaluation, or one that compares runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_multiagent.folders import RUN_FILE, read_json
from trl_multiagent.report.html import REPORT_FILE, write_page
from trl_multiagent.report.run_page import comparison_page, read_run


EVALUATION_FILES = ("evaluation.json", "cross_play.json")
COMPARISON_FILE = "comparison.html"


def make_report(folders: Sequence[str], output: str | None = None) -> Path:
    """
    Makes the report of a run, of an evaluation, or of a comparison of several runs. Returns the path of the page: in
    the folder, or in the working directory if there are several folders.

    Args:
        folders (`Sequence[str]`): Folders of runs or of one evaluation. A folder of several runs stands for all of
            them, and for their evaluation in it.
        output (`str`, *optional*): Path of the page.

    Raises:
        ValueError: A folder holds neither a run nor an evaluation.
    """
    from trl_multiagent.trainers.base.run_report import run_report  # imports TRL

    first = Path(folders[0])
    target = Path(output) if output else first / REPORT_FILE if len(folders) == 1 else Path(COMPARISON_FILE)
    evaluation = evaluation_in(first) if len(folders) == 1 else None
    if evaluation is not None:
        page = {"title": f"Evaluation: {first.absolute().name}", "evaluation": evaluation}
    else:
        runs = list({run.resolve(): run for folder in folders for run in runs_in(Path(folder))}.values())
        evaluations = [x for path in first.glob("*/") if (x := evaluation_in(path)) is not None]
        evaluation = evaluations[0] if len(evaluations) == len(folders) == 1 else None
        page = run_report(runs[0]) if len(runs) == 1 else comparison_page([read_run(run) for run in runs], evaluation)
    write_page(page, target)
    return target


def evaluation_in(folder: Path) -> dict[str, Any] | None:
    """Returns the JSON file of the evaluation in a folder, if there is one."""
    files = [folder / name for name in EVALUATION_FILES if (folder / name).is_file()]
    return read_json(files[0]) if files else None


def runs_in(folder: Path) -> list[Path]:
    """Returns the folder itself if it is a run's, or else the folders of the runs in it."""
    if (folder / RUN_FILE).is_file():
        return [folder]
    # The controls of an evaluation in the folder are runs, too
    runs = [
        path.parent
        for pattern in (f"*/{RUN_FILE}", f"*/controls/*/{RUN_FILE}")
        for path in sorted(folder.glob(pattern))
    ]
    if not runs:
        names = ", ".join((RUN_FILE, *EVALUATION_FILES))
        raise ValueError(f"{folder} holds none of {names}: give the output folder of a run or an evaluation.")
    return runs

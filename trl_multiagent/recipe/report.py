"""Runs `trl-multiagent report`: the page of a run or an evaluation, or one that compares runs."""

from collections.abc import Sequence
from pathlib import Path

from trl_multiagent.folders import RUN_FILE, read_json
from trl_multiagent.report.evaluation_page import evaluation_page
from trl_multiagent.report.html import REPORT_FILE, write_page
from trl_multiagent.report.run_page import comparison_page, read_run


EVALUATION_FILES = ("evaluation.json", "cross_play.json")
COMPARISON_FILE = "comparison.html"


def make_report(folders: Sequence[str], output: str | None = None) -> Path:
    """
    Makes the report of a run or of an evaluation, in its folder, or a page that compares several runs, in the working directory. Returns its
    path.

    Args:
        folders (`Sequence[str]`): Folders of runs or of one evaluation. A folder of several runs stands for all of them.
        output (`str`, *optional*): Where to write the page.

    Raises:
        ValueError: A folder holds neither a run nor an evaluation.
    """
    from trl_multiagent.trainers.base.run_report import run_report  # imports TRL

    if len(folders) == 1:
        for name in EVALUATION_FILES:
            path = Path(folders[0]) / name
            if path.is_file():
                target = Path(output) if output else path.with_name(REPORT_FILE)
                write_page(
                    evaluation_page(read_json(path), f"{path.stem.replace('_', '-')}: {path.absolute().parent.name}"),
                    target,
                )
                return target
    runs = [run for folder in folders for run in runs_in(Path(folder))]
    if len(runs) == 1:
        target = Path(output) if output else runs[0] / REPORT_FILE
        write_page(run_report(runs[0]), target)
    else:
        target = Path(output or COMPARISON_FILE)
        write_page(comparison_page([read_run(run) for run in runs]), target)
    return target


def runs_in(folder: Path) -> list[Path]:
    """Returns a folder if it is that of a run, or the runs in it."""
    if (folder / RUN_FILE).is_file():
        return [folder]
    runs = sorted(path.parent for path in folder.glob(f"*/{RUN_FILE}"))
    if not runs:
        names = " nor ".join(EVALUATION_FILES)
        raise ValueError(
            f"{folder} holds no run ({RUN_FILE}), and neither {names}: give the output folder of a run or an evaluation."
        )
    return runs

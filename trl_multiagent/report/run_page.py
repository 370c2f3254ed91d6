"""Makes the page of one run, and the page that compares several runs, from the files that a run leaves behind."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from trl_multiagent.folders import ALARMS_FILE, LOG_FILE, RECIPE_FILE, RUN_FILE, read_json
from trl_multiagent.report.curves import Log, Runs, charts, group_table, run_table, series_of
from trl_multiagent.report.trees import Row, tree_page


# Settings in which the runs of a group may differ
OF_ONE_RUN = {"seed", "data_seed"}
OWN_NAMES = ("algorithm", "roles", "models")  # what says its own name
SECRET = re.compile(r"""((?:token|api_key|password|secret)["']?(?:=|:|[ ])[ ]*)[^\s#]+""", re.IGNORECASE)


@dataclass
class RunFiles:
    """What the files in the folder of a run say."""

    folder: Path
    facts: dict[str, Any]
    logs: Sequence[Log]
    alarms: list[dict[str, Any]] = field(default_factory=list)
    configuration: str = ""

    @property
    def step(self) -> int:
        return max((log["step"] for log in self.logs), default=0)

    @property
    def identity(self) -> dict[str, Any]:
        """What runs of a group share."""
        own = {name: x for name, x in self.facts["settings"].items() if name not in OF_ONE_RUN}
        facts = {name: self.facts[name] for name in ("algorithm", "environment", "dataset")}
        models = list(dict.fromkeys(model for model in self.facts["agents"].values() if model))
        return {"roles": " + ".join(self.facts["agents"]), "models": ", ".join(models), **facts, **own}


def read_run(folder: Path, logs: Sequence[Log] | None = None) -> RunFiles:
    """Reads the files of a run, but for its trace. `logs`: the entries of its log, if they are in memory."""
    if logs is None:
        logs = read_lines(folder / LOG_FILE)
    recipe = folder / RECIPE_FILE
    configuration = SECRET.sub(r"\1***", recipe.read_text(encoding="utf-8")) if recipe.is_file() else ""
    return RunFiles(folder, read_json(folder / RUN_FILE), logs, read_lines(folder / ALARMS_FILE), configuration)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file with one JSON value per line; a missing file has none. A process that was killed may have left its last line unfinished."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run_page(run: RunFiles, trees: list[list[Row]]) -> dict[str, Any]:
    """Returns the page of a run. `trees`: the rows of each tree to show."""
    series = series_of(run.logs)
    drawn, constant = charts({"": [series]})
    facts = run.facts
    sections = [
        {"title": "Settings that are not the default", "rows": [["setting", "value"], *of_mapping(facts["settings"])]},
        {"title": "Versions", "rows": [["package", "version"], *of_mapping(facts["versions"])]},
        {"title": "Metrics that never changed", "rows": [["metric", "value"], *constant]},
    ]
    return {
        "title": f"{facts['algorithm']}: {run.folder.absolute().name}",
        "summary": summary(run, series),
        "tables": [{"title": "", "rows": run_table(series)}],
        "alarms": run.alarms,
        "charts": drawn,
        "trees": tree_page(trees),
        "details": [section for section in sections if len(section["rows"]) > 1],
        "texts": [x for x in (("Configuration", run.configuration), ("Reproduce", reproduce(run))) if x[1]],
    }


def summary(run: RunFiles, series: Mapping[str, Any]) -> list[list[str]]:
    """Returns the facts at the top of the page, as names and values."""
    facts = run.facts
    started, updated = datetime.fromisoformat(facts["started"]), datetime.now().astimezone()
    seconds = next((log["train_runtime"] for log in reversed(run.logs) if "train_runtime" in log), None)
    rows = [["Step", state_of(run)], ["Page made", f"{updated:%Y-%m-%d %H:%M}"]]
    rows += [["Agents", show_value(facts["agents"])]]
    rows += [["Environment", facts["environment"]], ["Data", facts["dataset"]]]
    rows += [["Started", f"{started:%Y-%m-%d %H:%M}"]]
    rows += [["Training time", str(timedelta(seconds=round(seconds)))]] if seconds is not None else []
    for name, text in (("env_step", "Scored joint actions"), ("num_tokens", "Tokens")):
        if name in series:
            rows.append([text, f"{series[name].max():,.0f}"])
    rows.append(["Machine", facts["machine"]])
    return [row for row in rows if row[1]]


def state_of(run: RunFiles) -> str:
    return f"{run.step} of {run.facts['max_steps']}, {'finished' if run.facts['finished'] else 'not finished'}"


def reproduce(run: RunFiles) -> str:
    """Returns how to start the run again."""
    packages = " ".join(f"{name}=={version}" for name, version in run.facts["versions"].items() if name != "python")
    return f"pip install {packages}\n{run.facts['command']}"


def comparison_page(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Returns the page that compares runs. Runs with the same settings but for their seeds are a group."""
    groups = group_runs(runs)
    series: dict[str, Runs] = {
        name: [series_of(run.logs) for run in members if run.logs] for name, members in groups.items()
    }
    drawn, constant = charts(series)
    heading = ["run", "group", "seed", "step", "folder"]
    rows = [
        [run.folder.absolute().name, name, run.facts["seed"], state_of(run), str(run.folder)]
        for name, members in groups.items()
        for run in members
    ]
    several = any(len(members) > 1 for members in groups.values())
    note = "A line is the mean of the runs of a group, its band one standard deviation of the runs." if several else ""
    values = [dict(differing_settings(runs, run)) for run in runs]
    settings = [[name, *(of_run[name] for of_run in values)] for name in values[0]]
    details = [{"title": "Runs", "rows": [heading, *rows]}]
    details += [
        {"title": "Differences", "rows": [["setting", *(run.folder.absolute().name for run in runs)], *settings]}
    ] * bool(settings)
    details += [{"title": "Metrics that never changed", "rows": [["metric", "value"], *constant]}] * bool(constant)
    alarms = [{**alarm, "run": run.folder.absolute().name} for run in runs for alarm in run.alarms]
    return {
        "title": f"{len(runs)} runs in {len(groups)} groups" if len(groups) > 1 else f"{len(runs)} runs",
        "summary": [[name, ", ".join(str(run.folder) for run in members)] for name, members in groups.items()],
        "tables": [{"title": "", "rows": group_table(series)}],
        "note": f"{note} Differences have Welch's 95 % intervals over runs where both groups have several.".strip(),
        "alarms": alarms,
        "charts": drawn,
        "details": details,
        "texts": [],
    }


def group_runs(runs: Sequence[RunFiles]) -> dict[str, list[RunFiles]]:
    """Groups runs that differ at most in their seeds. A group is named by the first settings that tell it from the others."""
    groups: dict[str, list[RunFiles]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.identity, sort_keys=True), []).append(run)
    words = [
        [value if name in OWN_NAMES else f"{name} {value}" for name, value in differing_settings(runs, members[0])]
        for members in groups.values()
    ]
    for number in range(1, len(words[0]) + 1):
        names = [", ".join(of_group[:number]) for of_group in words]
        if len(set(names)) == len(names):
            return dict(zip(names, groups.values(), strict=True))
    return {runs[0].facts["algorithm"]: list(runs)}


def differing_settings(runs: Sequence[RunFiles], run: RunFiles) -> list[tuple[str, str]]:
    """Returns the settings in which runs differ, with the values of one of them."""
    names = dict.fromkeys(name for run in runs for name in run.identity)
    return [
        (name, show_value(run.identity.get(name)))
        for name in names
        if len({json.dumps(run.identity.get(name), sort_keys=True) for run in runs}) > 1
    ]


def of_mapping(values: Mapping[str, Any]) -> list[list[str]]:
    return [[name, show_value(value)] for name, value in values.items()]


def show_value(value: Any) -> str:
    """Returns a setting as a short text."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {x}" if x else name for name, x in value.items())
    return "default" if value is None else str(value)


def without_secrets(command: Sequence[str]) -> str:
    """Returns a command line for a shell, without tokens and keys."""
    return SECRET.sub(r"\1***", shlex.join(command))

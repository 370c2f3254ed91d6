"""Makes the data of a run's page, and of a page that compares runs, from the files of the runs."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trl_multiagent.folders import ALARMS_FILE, LOG_FILE, RECIPE_FILE, RUN_FILE, naming_damage, read_json
from trl_multiagent.report.curves import curves, group_table, run_table, series_of
from trl_multiagent.report.trees import Row, tree_page


logger = logging.getLogger(__name__)

# Settings and sections in which the runs of a group may differ
OF_ONE_RUN = {"seed", "data_seed", "output_dir", "run_name", "resume_from_checkpoint", "resume_changes"}
OWN_SECTIONS = {"output", "wandb"}
OWN_NAMES = ("algorithm", "roles", "models")  # settings whose values are shown without the setting's name
SECRET_NAME = r"(?:(?<!bos_|eos_|pad_|unk_)token|api_key|password|secret)"
SECRET = re.compile(rf"""({SECRET_NAME}["']?(?:=|:|[ ])[ ]*)[^\s#]+""", re.IGNORECASE)


@dataclass
class RunFiles:
    """The contents of the files in the folder of a run."""

    folder: Path
    facts: dict[str, Any]
    logs: Sequence[Mapping[str, Any]]
    alarms: list[dict[str, Any]]
    configuration: str
    settings: dict[str, Any]  # the settings in the configuration, by their paths

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    @property
    def shown_facts(self) -> dict[str, Any]:
        step = max((log["step"] for log in self.logs), default=0)
        seconds = [log["train_runtime"] for log in self.logs if "train_runtime" in log]
        own = {"name": self.name, "folder": str(self.folder), "step": step, "train_runtime": sum(seconds)}
        totals = {name: log[name] for log in self.logs for name in ("env_step", "num_tokens") if name in log}
        return {**own, **totals, **self.facts}

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that all runs of a group share."""
        settings = {**self.facts["settings"], **self.settings}
        own = {name: x for name, x in settings.items() if name.split(".")[-1] not in OF_ONE_RUN}
        facts = {name: self.facts[name] for name in ("algorithm", "environment", "dataset")}
        models = list(dict.fromkeys(model for model in self.facts["agents"].values() if model))
        facts["processes"] = self.facts["machine"].split(" ")[0]
        return {"roles": " + ".join(self.facts["agents"]), "models": ", ".join(models), **facts, **own}


def read_run(folder: Path, logs: Sequence[Mapping[str, Any]] | None = None) -> RunFiles:
    """Reads the files of a run, except for its trace. `logs`: the entries of its log, if they are in memory."""
    logs = read_lines(folder / LOG_FILE) if logs is None else logs
    recipe, facts = folder / RECIPE_FILE, read_json(folder / RUN_FILE)
    text = recipe.read_text(encoding="utf-8") if recipe.is_file() else ""
    sections = {name: x for name, x in masked(yaml.safe_load(text) or {}).items() if name not in OWN_SECTIONS}
    # The arguments of a trainer have no section in run.json either
    settings = {name.removeprefix(f"{facts['algorithm'].lower()}."): x for name, x in by_path(sections).items()}
    alarms = read_lines(folder / ALARMS_FILE)
    return RunFiles(folder, facts, logs, alarms, without_secrets(text), settings)


def by_path(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns nested settings by their paths, such as `peft.r`."""
    found: dict[str, Any] = {}
    for name, x in values.items():
        found |= by_path(x, f"{path}{name}.") if isinstance(x, dict) and x else {f"{path}{name}": x}
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """
    Reads a file with one JSON value per line; a missing file has none. A last line without a line break is left out: a
    killed process has not finished it. Other damaged lines, such as those of a full disk, are left out with a warning.
    """
    with naming_damage(path):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    values, number_unreadable = [], 0
    for line in lines:
        try:
            values.append(json.loads(line))
        except ValueError:
            number_unreadable += 1
    if number_unreadable:
        logger.warning("%s: %d of %d lines are damaged, and left out.", path, number_unreadable, len(lines))
    return values


def without_secrets(text: str) -> str:
    """Returns a configuration or a command without tokens and passwords."""
    return SECRET.sub(r"\1***", text)


def masked(value: Any) -> Any:
    """Returns plain values without tokens and passwords."""
    if isinstance(value, list):
        return [masked(x) for x in value]
    if not isinstance(value, dict):
        return value
    secrets = {name for name in value if re.search(f"{SECRET_NAME}$", str(name), re.IGNORECASE)}
    return {name: "***" if name in secrets and type(x) in (str, int) else masked(x) for name, x in value.items()}


def run_page(run: RunFiles, trees: list[list[Row]]) -> dict[str, Any]:
    """Returns the page of a run. `trees`: the rows of each tree to show."""
    series = series_of(run.logs)
    return {
        "title": f"{run.facts['algorithm']}: {run.name}",
        "facts": run.shown_facts,
        "table": run_table(series),
        "alarms": run.alarms,
        "groups": [""],
        "metrics": curves([[series]]),
        "trees": tree_page(trees),
        "configuration": run.configuration,
    }


def comparison_page(runs: Sequence[RunFiles], evaluation: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the page that compares runs. `evaluation`: the JSON file of an evaluation of their teams."""
    groups = group_runs(runs)
    series = {name: [series_of(run.logs) for run in members] for name, members in groups.items()}
    names = distinct_names([run.folder for run in runs])
    return {
        "title": f"{len(runs)} runs, {len(groups)} group{'s' if len(groups) > 1 else ''}",
        "runs": [
            {"group": name, **run.shown_facts, "name": names[run.folder]}
            for name, members in groups.items()
            for run in members
        ],
        "differences": {names[run.folder]: dict(differing_settings(runs, run)) for run in runs},
        "table": group_table(series),
        "alarms": [{**alarm, "run": names[run.folder]} for run in runs for alarm in run.alarms],
        "groups": [*groups],
        "metrics": curves([*series.values()]),
        "evaluation": evaluation,
    }


def distinct_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Returns the shortest end of each path that no other path has."""
    paths = {folder: folder.resolve().parts for folder in folders}
    names = {}
    for folder, parts in paths.items():
        length = 1
        while length < len(parts) and sum(other[-length:] == parts[-length:] for other in paths.values()) > 1:
            length += 1
        names[folder] = "/".join(parts[-length:])
    return names


def group_runs(runs: Sequence[RunFiles]) -> dict[str, list[RunFiles]]:
    """
    Groups runs that differ at most in their seeds. A group is named by the first settings that distinguish it from the
    others.
    """
    groups: dict[str, list[RunFiles]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.identity, sort_keys=True), []).append(run)
    words = [
        [value if name in OWN_NAMES else f"{name} {value}" for name, value in differing_settings(runs, members[0])]
        for members in groups.values()
    ]
    for number in range(1, len(words[0]) + 1):
        names = [", ".join(group_words[:number]) for group_words in words]
        if len(set(names)) == len(names):
            return dict(zip(names, groups.values(), strict=True))
    algorithm = runs[0].facts["algorithm"]
    return {algorithm + f" {k}" * (k > 1): members for k, members in enumerate(groups.values(), start=1)}


def differing_settings(runs: Sequence[RunFiles], run: RunFiles) -> list[tuple[str, str]]:
    """Returns the settings in which runs differ, with the values of `run`."""
    names = dict.fromkeys(name for run in runs for name in run.identity)
    differing = [x for x in names if len({json.dumps(run.identity.get(x), sort_keys=True) for run in runs}) > 1]
    return [(name, str(run.identity.get(name, "default"))) for name in differing]

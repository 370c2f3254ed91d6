"""Makes the data of a run's page, and of a page that compares runs, from the files of the runs."""

import contextlib
import json
import logging
import math
import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers.utils import flatten_dict

from trl_multiagent.folders import ALARMS_FILE, LOG_FILE, RECIPE_FILE, RUN_FILE, naming_damage, read_json
from trl_multiagent.report.curves import curves, group_table, run_table, series_of
from trl_multiagent.rollout.tree import grouped, mean_of_known


logger = logging.getLogger(__name__)

Row = dict[str, Any]  # of a trace, see `rollout/trace.py`
Tree = list[Row]

MAX_TREES = 100
MAX_CHARS = 4_000_000  # of all texts of a page
MAX_TEXT = 20_000  # characters of one text

# Settings and sections in which the runs of a group may differ
OF_ONE_RUN = {"seed", "data_seed", "output_dir", "run_name", "resume_from_checkpoint", "resume_changes"}
OWN_SECTIONS = {"output", "wandb"}
# What a run makes itself, and so depends on its seed: its preferences and its reward model
OWN_DATA = re.compile(r"(?s)^\d* ?((items with .*_chosen|ModelRewardEnvironment).*), (digest|version=).*")
OWN_NAMES = ("algorithm", "roles", "models")  # settings that are shown without their name
SECRET_NAME = r"(?:(?<!bos_|eos_|pad_|unk_)(?<!_per_)(?<!\bper_)token|api[_-]?key|passw(?:or)?d|secret|authorization)"
# `name=value`, `name: value` and `--name value` in a text, where a place for a value, as in prompts, is no secret
VALUE = r"""(?!\{\w*\})(?:'[^'\n]*'|"[^"\n]*"|\S+)"""
SECRET = re.compile(
    rf"""((?:{SECRET_NAME}["']?[ ]?[=:]|(?<![\w.-])--?[\w.-]*{SECRET_NAME}["']?[ ])[ ]*"""
    rf"""(?:(?:Bearer|Basic|token)[ ]+)?){VALUE}|(?<=://)[^\s/@:]*:[^\s/]+(?=@)"""
    r"""|\b(?:hf_|gh[ops]_)[a-z0-9]{30,}|\bsk-(?=[\w-]*\d)[\w-]{20,}""",
    re.IGNORECASE,
)


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
    def shown_facts(self) -> dict[str, Any]:
        return {
            "name": self.folder.absolute().name,
            "folder": str(self.folder),
            "step": max((log["step"] for log in self.logs), default=0),
            "train_runtime": sum(log.get("train_runtime", 0) for log in self.logs),
            **{name: log[name] for log in self.logs for name in ("env_step", "num_tokens") if name in log},
            **self.facts,
            # A task of a recipe has a name; others are described by their environments
            "task": self.settings.get("task") or self.facts["environment"],
        }

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that all runs of a group share."""
        facts = self.facts
        return {
            "roles": " + ".join(facts["agents"]),
            "models": ", ".join(dict.fromkeys(filter(None, facts["agents"].values()))),
            # Without a configuration, the data may be all that distinguishes two runs
            **{
                name: OWN_DATA.sub(r"\1", facts[name]) if self.settings else facts[name]
                for name in ("algorithm", "environment", "dataset")
            },
            "processes": facts["machine"].split(" ")[0],
            **{
                name: x
                for name, x in (facts["settings"] | self.settings).items()
                if name.split(".")[-1] not in OF_ONE_RUN
            },
        }


def read_run(folder: Path) -> RunFiles:
    """Reads the files of a run, except for its trace."""
    recipe, facts = folder / RECIPE_FILE, read_json(folder / RUN_FILE)
    text = recipe.read_text(encoding="utf-8") if recipe.is_file() else ""
    configuration = masked(yaml.safe_load(text) or {})
    sections = {name: x for name, x in configuration.items() if name not in OWN_SECTIONS}
    # The arguments of a trainer have no section in run.json either
    settings = {name.removeprefix(f"{facts['algorithm'].lower()}."): x for name, x in flatten_dict(sections).items()}
    shown = yaml.safe_dump(configuration, sort_keys=False, allow_unicode=True) if text else ""
    return RunFiles(folder, facts, read_lines(folder / LOG_FILE), read_lines(folder / ALARMS_FILE), shown, settings)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """
    Reads a file with one JSON object per line; a missing file has none. A last line without a line break is left out:
    a killed process has not finished it. Other damaged lines, as a full disk leaves them, are skipped with a warning.
    """
    with naming_damage(path):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    entries = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            entries.append({**json.loads(line)})
    number_unreadable = len(lines) - len(entries)
    if number_unreadable:
        logger.warning("%s: %d of %d lines are damaged, and left out.", path, number_unreadable, len(lines))
    return entries


def masked(value: Any) -> Any:
    """Returns plain values, or a text such as a command, without tokens and passwords."""
    if isinstance(value, str):
        return SECRET.sub(r"\1***", value)
    if isinstance(value, list):
        return [masked(x) for x in value]
    if not isinstance(value, dict):
        return value
    return {
        name: "***" if SECRET.search(f"{name}=x") and not isinstance(x, dict | bool | None) else masked(x)
        for name, x in value.items()
    }


def run_page(run: RunFiles, trees: list[Tree]) -> dict[str, Any]:
    """Returns the page of a run. `trees`: the rows of each tree to show."""
    series, facts = series_of(run.logs), run.shown_facts
    return {
        "title": f"{facts['algorithm']}: {facts['name']}",
        "facts": facts,
        "table": run_table(series),
        "alarms": run.alarms,
        "groups": [""],
        "metrics": curves([[series]]),
        "trees": tree_page(trees),
        "example": tree_page(same_item(trees)),
        "configuration": run.configuration,
    }


def comparison_page(runs: Sequence[RunFiles], evaluation: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the page that compares runs. `evaluation`: the JSON file of an evaluation of their teams."""
    groups = group_runs(runs)
    series = {name: [series_of(run.logs) for run in members] for name, members in groups.items()}
    common = os.path.commonpath([run.folder.resolve().parent for run in runs])
    names = {run.folder: os.path.relpath(run.folder.resolve(), common) for run in runs}
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


def group_runs(runs: Sequence[RunFiles]) -> dict[str, list[RunFiles]]:
    """
    Groups runs that differ at most in their seeds. A group is named by the first settings that distinguish it from the
    others.
    """
    groups = grouped((json.dumps(run.identity, sort_keys=True), run) for run in runs)
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
    return [
        (name, str(run.identity.get(name, "default")))
        for name in dict.fromkeys(name for other in runs for name in other.identity)
        if len({json.dumps(other.identity.get(name), sort_keys=True) for other in runs}) > 1
    ]


# Trees


def trees_of(rows: Iterable[Row]) -> list[Tree]:
    """Groups rows by tree, in their order. The episodes of an item are one group."""
    return list(grouped(((row["step"], row["split"], row["process"], row["tree"]), row) for row in rows).values())


def choose_trees(trees: list[Tree], seed: int) -> list[Tree]:
    """Returns the best and the worst tree, and then a random one."""
    best, *others = sorted(trees, key=root_return, reverse=True)
    between = others[:-1]
    # Not the global generator, which the rollouts use
    return [best, *others[-1:], *random.Random(seed).sample(between, min(1, len(between)))]


def same_item(trees: list[Tree]) -> list[Tree]:
    """
    Returns the first and the last tree of an item that was seen from nearly the first step to nearly the last one: of
    these items, the one with the median first return. Without an item that recurs, these are the first and the last
    tree of all. Trees without a return are left out.
    """
    ordered = sorted((x for x in trees if root_return(x) > -math.inf), key=lambda tree: tree[0]["step"])
    items = grouped(((tree[0]["split"], tree[0]["item"]), tree) for tree in ordered)
    longest = max(map(span, items.values()), default=0)
    if longest == 0:
        return [ordered[0], ordered[-1]] if ordered and span(ordered) else []
    seen = [found for found in items.values() if span(found) >= 0.9 * longest]
    typical = sorted(seen, key=lambda found: root_return(found[0]))[(len(seen) - 1) // 2]
    return [typical[0], typical[-1]]


def span(trees: list[Tree]) -> int:
    """Returns the number of steps from the first tree to the last one."""
    return trees[-1][0]["step"] - trees[0][0]["step"]


def root_return(tree: Tree) -> float:
    """Returns the mean return of a tree's first joint actions, or negative infinity if nothing scored them."""
    # The mean of nothing is NaN, which is not larger
    return max(-math.inf, mean_of_known([row["return"] for row in tree if row["turn"] == 1]))


def tree_page(trees: list[Tree]) -> dict[str, Any]:
    """
    Returns trees as one table: the names of its columns, and the rows of each tree. Siblings share prompts and
    completions, so each is stored once, in `texts`, and a cell has its number. Long texts are cut. If there are too
    many trees, the latest are kept.
    """
    columns = list(dict.fromkeys(name for tree in trees for name in tree[0]))
    texts: dict[str, int] = {}

    def cell(name: str, value: Any) -> Any:
        if isinstance(value, str):
            more = len(value) - MAX_TEXT
            value = f"{value[:MAX_TEXT]}\n... {more} more characters" if more > 0 else value
            return texts.setdefault(value, len(texts)) if name.startswith(("prompt/", "completion/")) else value
        return None if isinstance(value, float) and math.isnan(value) else value  # data frames fill gaps with NaN

    kept: list[list[list[Any]]] = []
    size = 0  # of the texts in cells
    for tree in trees[-MAX_TREES:][::-1]:
        if kept and size + sum(map(len, texts)) > MAX_CHARS:
            break
        kept.append([[cell(name, row.get(name)) for name in columns] for row in tree])
        size += sum(len(x) for row in kept[-1] for x in row if isinstance(x, str))
    return {"columns": columns, "trees": kept[::-1], "texts": [*texts], "left_out": len(trees) - len(kept)}

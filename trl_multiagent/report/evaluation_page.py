"""Makes the page of an evaluation from its JSON file."""

from collections.abc import Mapping
from typing import Any


HEADINGS = {
    "differences": "The team minus the baseline",
    "control": "The team minus a model trained at its cost",
    "contributions": "The team minus the team without a part",
}


def evaluation_page(contents: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Returns the page of an evaluation or a cross-play. `contents`: those of its JSON file."""
    settings, policies = contents["settings"], contents["policies"]
    confidence = f"{settings['confidence']:.0%}"
    summary = [
        ["Items", f"{contents['items']}, {settings['num_episodes']} sampled episodes each"],
        ["Environment", contents.get("environment", "")],
        ["Intervals", f"{confidence}, over items; those of all teams over items and teams"],
    ]
    rows = {name: policy["results"]["final"] for name, policy in policies.items()}
    if "over_teams" in contents:
        rows["all teams"] = contents["over_teams"]["final"]
    main = [name for name in next(iter(rows.values())) if name == "return" or is_rate(name)]
    parts = [estimates("", rows, main, f"Lines are {confidence} intervals.")]
    parts += [
        estimates(
            heading,
            {name: numbers["final"] for name, numbers in contents[key].items()},
            main,
            "An interval without 0 shows a difference.",
        )
        for key, heading in HEADINGS.items()
        if key in contents
    ]
    parts.append(cost(policies))
    parts += [turns(name, policy["results"]) for name, policy in policies.items() if policy["kind"] != "pair"]
    shown = [[name, str(value)] for name, value in settings.items() if value is not None]
    shown += [
        [f"dataset.{name}", str(value)] for name, value in contents.get("dataset", {}).items() if value is not None
    ]
    sources = [[name, policy["kind"], str(policy["source"])] for name, policy in policies.items()]
    return {
        "title": title,
        "summary": [row for row in summary if row[1]],
        "estimates": parts,
        "matrices": matrices(contents.get("cross_play", {})),
        "details": [
            {"title": "Policies", "rows": [["policy", "kind", "source"], *sources]},
            {"title": "Settings", "rows": [["setting", "value"], *shown]},
        ],
    }


def is_rate(name: str) -> bool:
    return name.startswith("pass@") or name == "passed_hidden"


def estimates(title: str, rows: Mapping[str, Mapping[str, Any]], names: list[str], note: str = "") -> dict[str, Any]:
    """Returns a table of estimates, of which a difference may be negative."""
    found = [name for name in names if any(name in row for row in rows.values())]
    columns = [{"name": name, "rate": is_rate(name), "whole": is_rate(name) and not title} for name in found]
    cells = [{"name": name, "cells": [row.get(x) for x in found]} for name, row in rows.items()]
    return {"title": title, "columns": columns, "rows": cells, "note": note}


def turns(name: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns every metric of a policy, a column per turn."""
    of_turns = {turn: numbers for turn, numbers in results.items() if turn != "final"}
    metrics = list(dict.fromkeys(metric for numbers in of_turns.values() for metric in numbers))
    columns = [{"name": turn.replace("_", " "), "rate": False} for turn in of_turns]
    cells = [{"name": x, "cells": [numbers.get(x) for numbers in of_turns.values()]} for x in metrics]
    return {"title": f"{name}, by turn", "columns": columns, "rows": cells, "plain": True}


def cost(policies: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an episode of each policy costs, and how long its answers take."""
    rows = []
    for name, policy in policies.items():
        of_episode, speed = policy["cost_per_episode"], policy["speed"] or {}
        numbers = [of_episode[x] for x in ("calls", "generated_tokens", "wall_seconds")]
        numbers += [speed.get(x) for x in ("sequential_latency", "parallel_latency", "sequential_tokens_per_second")]
        rows.append({"name": name, "cells": [None if x is None else {"mean": x} for x in numbers]})
    names = [
        "calls",
        "generated tokens",
        "wall seconds",
        "latency, s",
        "latency if agents answer at once, s",
        "tokens per second",
    ]
    columns = [{"name": name, "rate": False} for name in names]
    return {"title": "Cost and latency of an episode", "columns": columns, "rows": rows}


def matrices(cross_play: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the matrices of a cross-play, with a title that compares teams as they were trained with mixed ones."""
    found = []
    for metric, result in cross_play.items():
        if metric == "runs":
            continue
        together, mixed = result["diagonal"]["mean"], result["off_diagonal"]["mean"]
        for role, values in result["matrices"].items():
            title = f"{metric}: {together:.3f} as trained (diagonal), {mixed:.3f} mixed"
            labels = {"row": f"run of {role}", "column": "run of the others"}
            found.append({"title": title, "names": cross_play["runs"], "values": values, **labels})
    return found

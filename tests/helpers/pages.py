"""Reads the pages of reports, and writes what they are made of."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_page(path: Path) -> dict[str, Any]:
    """Returns the data of a page, as the browser finds it."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])


def write_run(
    folder: Path, seed: int, rewards: Sequence[float], roles: Sequence[str] = ("aux", "main"), **settings: Any
) -> None:
    """Writes the files of a run whose log has these rewards, and was cut off in its last line."""
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"algorithm": "MAGRPO", "seed": seed, "settings": {"seed": seed, **settings}}
    facts |= {"environment": "E", "versions": {"python": "3"}}
    facts |= {"agents": dict.fromkeys(roles, "base"), "dataset": "8 items", "max_steps": 2, "finished": True}
    facts |= {"started": "2026-01-01T10:00:00+00:00", "command": "train", "machine": "1 process on CPU"}
    (folder / "run.json").write_text(json.dumps(facts))
    logs = [{"step": k, "reward": reward} for k, reward in enumerate(rewards, start=1)]
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(log)}\n" for log in logs) + '{"step": 3, "rew')

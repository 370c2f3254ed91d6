"""
Makes a report: one HTML page that needs no network, with its data as JSON and the scripts in `page/` that show it.
"""

import base64
import hashlib
import html
import json
import math
import re
from pathlib import Path
from typing import Any

from trl_multiagent.folders import write_text


PAGE = Path(__file__).with_name("page")
SCRIPTS = ("uPlot.iife.min.js", "logic.js", "trees.js", "report.js")
REPORT_FILE = "report.html"


def write_page(data: dict[str, Any], path: Path) -> None:
    """
    Writes the page of a report. `data`: plain values, with a `title`; page/report.js lists the parts that it may have.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render(data))


def render(data: dict[str, Any]) -> str:
    """
    Returns the page of a report. Texts of models cannot become code: the JSON has no `<` that could end its element,
    the scripts show texts as text, and the page's policy lets the browser run only these scripts.
    """
    scripts = [(PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS]
    styles = [(PAGE / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "report.css")]
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    contents = json.dumps(json_values(data), allow_nan=False, separators=(",", ":"))
    values = {
        "title": html.escape(str(data["title"])),
        "policy": " ".join(f"'sha256-{digest}'" for digest in hashes),
        "style": "".join(styles),
        "data": contents.replace("<", "\\u003c"),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    template = (PAGE / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def json_values(value: Any, digits: int = 6) -> Any:
    """
    Converts values to types of JSON: rounds floats to so many digits, but keeps all digits before the point, makes
    numbers that are not finite null, named tuples objects, and other objects texts.
    """
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(name): json_values(x, digits) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(x, digits) for x in value]
    if isinstance(value, float) and not value.is_integer():  # counts stay exact
        rounded = float(f"{value:.{digits}g}") if abs(value) < 10**digits else value
        return rounded if math.isfinite(value) else None
    return value if isinstance(value, int | float | None) else str(value)

"""Reads the pages of reports."""

import json
import re
from pathlib import Path
from typing import Any


def read_page(path: Path) -> dict[str, Any]:
    """Returns the data of a page, as the browser finds it."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])

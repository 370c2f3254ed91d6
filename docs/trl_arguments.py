"""
Writes the table of TRL's arguments in configuration.md: what works, what differs, and what is refused. A test fails when it is out of
date; run `python docs/trl_arguments.py` then.
"""

import re
from pathlib import Path

from trl_multiagent.limits import BOUNDS, describe_limits
from trl_multiagent.recipe.algorithms import ALGORITHMS
from trl_multiagent.recipe.fields import read_fields
from trl_multiagent.recipe.sections import TRL_NAMES


PAGE = Path(__file__).parent / "configuration.md"
START, END = "<!-- trl arguments -->\n", "<!-- end of trl arguments -->\n"


def table() -> str:
    """The table and the list of the arguments that work without a difference, as Markdown."""
    theirs = read_fields("trl.trainer.grpo_config.GRPOConfig")
    ours = read_fields(ALGORITHMS["magrpo"].config)
    renamed = {old.removeprefix("{algorithm}."): new for old, new in TRL_NAMES.items()}
    rows: dict[str, list[str]] = {"refused": [], "no effect": [], "differs": [], "works": []}
    plain = []
    for name, field in theirs.items():
        limits = ours[name].limits
        if name in renamed:
            rows["differs"].append(f"| `{name}` | differs | in a recipe the same as `{renamed[name]}` |")
        elif "refused" in limits:
            rows["refused"].append(f"| `{name}` | refused | {limits['refused']} |")
        elif "no_effect" in limits:
            rows["no effect"].append(f"| `{name}` | no effect | {limits['no_effect']} |")
        elif "differs" in limits or ours[name].default != field.default:
            text = limits.get("differs", f"{ours[name].default!r} by default, instead of {field.default!r}")
            rows["differs"].append(f"| `{name}` | differs | {text} |")
        else:
            notes = [f"with `{limits['needs']}`"] if "needs" in limits else []
            notes += [describe_limits(limits)] if BOUNDS.keys() & limits.keys() else []
            if notes:
                rows["works"].append(f"| `{name}` | works | {'; '.join(notes)} |")
            else:
                plain.append(f"`{name}`")
    lines = ["| argument | here | |", "| --- | --- | --- |", *(row for group in rows.values() for row in group)]
    return "\n".join(lines) + f"\n\nThese work as they do in TRL: {', '.join(plain)}.\n"


def updated(page: str) -> str:
    """The page with the current table."""
    return re.sub(f"{START}.*{END}", lambda match: f"{START}\n{table()}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))

"""
Writes the table of TRL's arguments in trl_arguments.md: what works, what differs, and what is refused. A test fails
when it is out of date; run `python docs/trl_arguments.py` then.
"""

import dataclasses
import re
from pathlib import Path

from trl import GRPOConfig

from trl_multiagent import MAGRPOConfig
from trl_multiagent.limits import IN_PLACE_OF, unsupported_by
from trl_multiagent.settings.read import RENAMED


PAGE = Path(__file__).parent / "trl_arguments.md"
START, END = "<!-- trl arguments -->\n", "<!-- end of trl arguments -->\n"
DIFFERS = {
    "bf16": "on by default where the hardware is quicker with it",
    "eval_steps": "10 by default",
    "gradient_accumulation_steps": "only without `items_per_device`, which says how many items a step has",
    "logging_steps": "0.01 by default, a share of all steps; trainings of up to 100 steps log each",
    "loss_type": "`luspo` by default; `bnpo`, `cispo`, `sapo` and `vespo` are not available",
    "num_completions_to_print": "3 by default, instead of all",
    "per_device_eval_batch_size": "by default the number of completions of a step's first turn",
    "scale_rewards": "only 'none'; see `advantage_normalization`",
    "torch_compile": "compiles the layers of the agents for the update, which keeps activations; not under ZeRO-3",
}
NO_EFFECT = {
    "do_train": "a trainer trains when `train()` is called",
    "do_eval": "`eval_strategy` decides whether a run evaluates",
    "do_predict": 'call `evaluate(dataset, metric_key_prefix="test")`',
    "local_rank": "`accelerate launch` sets the rank of the process",
    "log_multimodal": "agents read and write text",
}


def table() -> str:
    """Returns a table of all arguments as Markdown: those without an effect first, those that work as in TRL last."""
    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    ours = {field.name: field.default for field in dataclasses.fields(MAGRPOConfig)}
    unsupported = unsupported_by(MAGRPOConfig)
    section = "{algorithm}."
    renamed = {old.removeprefix(section): new for old, new in RENAMED.items() if old.startswith(section)}
    rows: dict[str, list[str]] = {"no effect": [], "differs": [], "refused": [], "as in TRL": []}
    for name, default in theirs.items():
        if name in renamed:
            kind, text = "differs", f"in a recipe the same as `{renamed[name]}`"
        elif name in unsupported:
            kind, text = "refused", IN_PLACE_OF.get(name, "")
        elif name in NO_EFFECT:
            kind, text = "no effect", NO_EFFECT[name]
        elif name in DIFFERS or ours[name] != default:
            kind, text = "differs", DIFFERS.get(name, f"{ours[name]!r} by default, instead of {default!r}")
        else:
            kind, text = "as in TRL", ""
        rows[kind].append(f"| `{name}` | {kind} | {text} |")
    lines = ["| argument | here | |", "| --- | --- | --- |", *(row for of_kind in rows.values() for row in of_kind)]
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """The page with the current table."""
    return re.sub(f"{START}.*{END}", lambda match: f"{START}\n{table()}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))

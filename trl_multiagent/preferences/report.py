"""The report of a collection: numbers, a warning, a picture, and the card of the dataset."""

import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub import DatasetCardData

from trl_multiagent.preferences.config import PreferenceConfig
from trl_multiagent.preferences.pairs import Pair
from trl_multiagent.preferences.rows import CHOSEN_BY, CHOSEN_REWARD, text_columns
from trl_multiagent.report.pictures import COLORS, draw_histograms, picture
from trl_multiagent.report.tables import markdown_table


logger = logging.getLogger(__name__)

PICTURE_FILE = "rewards.png"
HUB_FILE = "data/train-00000-of-00001.parquet"  # of a dataset on the Hub
FEW_ITEMS = 0.1  # a smaller share of items with pairs causes a warning
BINS = 16


def summarize(
    records: list[dict[str, Any]], pairs: list[list[Pair]], selected: list[list[Pair]], config: PreferenceConfig
) -> dict[str, Any]:
    """
    Counts the candidates in `records`, all pairs of each item, and the selected pairs. `env_steps` is the count of
    CoMLRL, which charges pairs and not samples; `candidates_sampled` and `candidates_scored` are the actual numbers of
    answers.
    """
    candidates, compared = candidates_of(records, "candidates"), candidates_of(records, "comparator")
    kept = [pair for item_pairs in selected for pair in item_pairs]
    texts = {
        (k, *sorted(candidate["texts"].items()))
        for k, record in enumerate(records)
        for candidate in (*record["candidates"], *record.get("comparator", ()))
    }
    completions = sum(len(record["candidates"]) * len(record["prompts"]) for record in records)
    numbers: dict[str, Any] = {
        "items": len(records),
        "items_with_pairs": sum(bool(item_pairs) for item_pairs in pairs),
        "candidates_sampled": len(candidates) + len(compared),
        "candidates_scored": len(candidates) + len(compared),
        "candidates_distinct": len(texts),
        "tokens_sampled": sum(record["tokens"] + record.get("comparator_tokens", 0) for record in records),
        "completions_truncated": sum(record["truncated"] for record in records) / completions,
        "pairs_possible": sum(map(len, pairs)),
        "pairs": len(kept),
        "env_steps": config.environment_steps(len(kept)),
        "mean_reward": fmean(candidate["reward"] for candidate in candidates),
    }
    if compared:
        numbers["mean_comparator_reward"] = fmean(candidate["reward"] for candidate in compared)
    if kept:
        numbers["mean_chosen_reward"] = fmean(pair.chosen.reward for pair in kept)
        numbers["mean_rejected_reward"] = fmean(pair.rejected.reward for pair in kept)
        numbers["mean_gap"] = fmean(pair.gap for pair in kept)
    return numbers


def candidates_of(records: list[dict[str, Any]], side: str) -> list[dict[str, Any]]:
    """Returns all candidates of the team (`"candidates"`) or of the comparator (`"comparator"`)."""
    return [candidate for record in records for candidate in record.get(side, ())]


def warn_if_few_pairs(numbers: dict[str, Any]) -> None:
    """Warns if almost no item has a pair, because training on such a dataset learns nothing about the other items."""
    if numbers["items_with_pairs"] >= FEW_ITEMS * numbers["items"] and numbers["pairs"] > 0:
        return
    logger.warning(
        "Only %d of %d items have answers with different rewards, so there are only %d pairs. The mean reward is "
        "%.3g, and %d of %d "
        "answers are different texts. Sample more candidates or at a higher temperature, or use items that are "
        "neither too "
        "easy nor too hard.",
        *(numbers[name] for name in ("items_with_pairs", "items", "pairs", "mean_reward", "candidates_distinct")),
        numbers["candidates_sampled"],
    )


def draw_rewards(records: list[dict[str, Any]], selected: list[list[Pair]], path: Path) -> None:
    """
    Draws the distributions of the rewards of all candidates, of the rewards of the selected pairs, and of their gaps.
    """
    pairs = [pair for item_pairs in selected for pair in item_pairs]
    rewards = {
        "candidates": [candidate["reward"] for candidate in candidates_of(records, "candidates")],
        "rejected": [pair.rejected.reward for pair in pairs],
        "chosen": [pair.chosen.reward for pair in pairs],
        "comparator": [candidate["reward"] for candidate in candidates_of(records, "comparator")],
    }
    gaps = [pair.gap for pair in pairs]
    with picture(path, panels=2) as (left, right):
        draw_histograms(left, rewards, BINS)
        left.set(title="Joint rewards", xlabel="reward")
        right.hist(gaps, BINS, color=COLORS[0])
        mean = f", mean {fmean(gaps):.2f}" if gaps else ""
        xlabel = "reward of the chosen minus that of the rejected answer"
        right.set(title=f"Gaps of {len(gaps)} pairs{mean}", xlabel=xlabel, ylabel="pairs")
        right.set_xlim(left=0)


def preference_card(facts: dict[str, Any], roles: Sequence[str], columns: list[str], config: PreferenceConfig) -> str:
    """Writes the card of the dataset. `facts`: the contents of [`~folders.PREFERENCES_FILE`]."""
    data = DatasetCardData(
        tags=["trl-multiagent", "preference"],
        pretty_name="Joint preferences",
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": HUB_FILE}]}],
    )
    metrics = [name for name in columns if name.startswith("chosen_") and name not in (CHOSEN_REWARD, CHOSEN_BY)]
    components = ", ".join(f"`{name.removeprefix('chosen_')}`" for name in metrics)
    by_role = "\n".join(
        f"| {', '.join(f'`{name}`' for name in text_columns(role))} | prompt, chosen and rejected answer of `{role}` |"
        for role in roles
    )
    settings = [("setting", "value"), *facts["pairing"].items(), *facts["sampling"].items()]
    numbers = [("number", "value")]
    numbers += [(name, f"{x:.4g}" if isinstance(x, float) else x) for name, x in facts["numbers"].items()]
    shown = f"\n![Rewards and gaps](./{PICTURE_FILE})\n" if config.log_reward_distribution else ""
    environment = "".join(f"    {line}\n" for line in facts["environment"].splitlines())
    return f"""---
{data.to_yaml()}
---

# Joint preferences

Pairs of joint answers of the agents {", ".join(f"`{role}`" for role in roles)}. Each row compares two joint answers to one item; the chosen one has
the greater joint reward. Made with trl_multiagent, which extends [TRL](https://github.com/huggingface/trl) to teams of models.

| column | contents |
| --- | --- |
{by_role}
| `item_id`, `round` | the item, and the round of the collection |
| `chosen_reward`, `rejected_reward` | the joint rewards |
| `chosen_by`, `rejected_by` | the policies that sampled the answers |
| `chosen_<name>`, `rejected_<name>` | components of the rewards: {components or "none"} |

```python
from trl_multiagent.preferences import load_preferences

preferences = load_preferences("FOLDER_OR_REPOSITORY", roles={list(roles)!r})
```

## Results
{shown}
{markdown_table(numbers)}
`env_steps` is the number that CoMLRL charges, {config.environment_steps_per_pair} per pair if `use_environment_step`. The actual cost is the number of candidates
that were sampled and scored; all of them are in the folder `candidates` of a collection.

## Settings

The environment, whose joint reward ranked the answers:

{environment}
{markdown_table(settings)}"""

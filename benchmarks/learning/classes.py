"""
How well two agents on Qwen2.5-Coder-0.5B-Instruct complete classes beside one, at an equal wait.

    python -m benchmarks.learning.classes --folder runs --model path.gguf          # every row that is not there yet
    python -m benchmarks.learning.classes team alone --folder runs --model path.gguf
    python -m benchmarks.learning.classes --show --folder runs --model path.gguf   # what is there
    python -m benchmarks.learning.classes --smoke                                  # seconds: whether it runs

A row is a policy, which answers to the 42 classes of ClassEval that no training uses. Of a team, each agent writes
some methods of a class; the single agent writes all. `whole_team` and `whole_alone` see the whole skeleton of a class,
`team` and `alone` the prompts of recipes/class_completion/prompts.py. `team_trained` is the team after
`magrpo_classeval_coder`, and `alone_trained` the agent after `grpo_classeval_coder`.

Everybody answers once, greedily. Agents of a team answer at the same time, so one waits for the longer answer. What a
greedy policy writes within a limit is the beginning of its longest answer: every answer is cut at each limit and
scored again. Intervals (95 %) of the differences are Student's, over classes.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.learning.coder import (
    Rows,
    chat_model,
    difference_of,
    episodes_of,
    head_of,
    measure,
    parse_rows,
    tokens_of,
)
from benchmarks.team_run import machine
from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.models.gguf import converted
from trl_multiagent.tasks.class_completion import ClassCompletionEnvironment, load_class_dataset


TASK, WHOLE = ["--task", "class_completion"], "prompt_files.methods=null"
# Name of each row -> its configuration, its changes, and whether it is trained
ROWS: Rows = {
    "whole_team": ("magrpo_classeval_coder", [WHOLE, *TASK], False),
    "whole_alone": ("grpo_classeval_coder", [WHOLE, *TASK], False),
    "team": ("magrpo_classeval_coder", TASK, False),
    "alone": ("grpo_classeval_coder", TASK, False),
    "team_trained": ("magrpo_classeval_coder", TASK, True),
    "alone_trained": ("grpo_classeval_coder", TASK, True),
}
COMPARED = [("whole_alone", "whole_team"), ("alone", "team"), ("team", "team_trained"), ("alone", "alone_trained")]
COMPARED += [("whole_team", "team"), ("alone", "team_trained"), ("alone_trained", "team_trained")]
LIMITS = (64, 96, 128, 192, 256, 384, 512)  # tokens of an answer
METRICS = {
    "earned_reward": "tests of single methods",
    "tests_passed": "all tests",
    "passed": "solved",
    "methods_written": "methods written",
    "overlap": "methods of others written, too",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    options = parse_rows(parser, ROWS, "classes.json")
    rows, split, limits = ROWS, "test[50:]", LIMITS
    with tempfile.TemporaryDirectory() as temporary, Sandbox() as sandbox:
        folder = options.folder or Path(temporary)
        if options.smoke:
            options.model, split, limits = chat_model(folder / "model"), "test[2:4]", (4,)
            rows = {
                name: (config, [f"dataset.eval_split={split}", *changes], trained)
                for name, (config, changes, trained) in ROWS.items()
            }
            options.rows = ["team", "alone"]
        options.tokens = limits[-1]
        for row in () if options.show else options.rows:
            measure(row, rows, options, folder)
        items = load_class_dataset("classeval", split, sandbox).to_list()
        episodes = {row: found for row in ROWS if (found := episodes_of(folder / row))}
        tokenizer = AutoTokenizer.from_pretrained(converted(options.model, weights=False))
        found = {
            row: [scored(items, episodes[row], tokenizer, limit, sandbox) for limit in limits] for row in episodes
        }
    numbers: dict[str, Any] = {"machine": machine(), "classes": len(items)}
    for metric, title in METRICS.items():
        print("", *head_of(f"{title}, {len(items)} classes", *[f"{limit} tokens" for limit in limits]), sep="\n")
        for row, scores in found.items():
            numbers[f"{row}, {title}"] = means = [score[metric].mean() for score in scores]
            print(f"| `{row}` | {' | '.join(f'{mean:.2f}' for mean in means)} |")
        for before, after in COMPARED:
            if before in found and after in found:
                pairs = zip(found[after], found[before], strict=True)
                print(
                    f"| `{after}` - `{before}` | {' | '.join(difference_of(x[metric], y[metric]) for x, y in pairs)} |"
                )
    for row in episodes:
        numbers[f"{row}, waited for"] = wait = tokens_of(episodes[row]).mean()
        print(f"{row}: one waits for {wait:.0f} tokens")
    options.output.write_text(json.dumps(numbers, indent=2) + "\n")


def scored(
    items: list[dict],
    episodes: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    sandbox: Sandbox,
) -> dict[str, np.ndarray]:
    """Returns the metrics of each class if every answer ends after `limit` tokens."""
    actions = []
    for episode in episodes:
        (turn,) = episode["turns"]
        actions.append({role: cut(text, tokenizer, limit) for role, text in turn["completions"].items()})
    environment = ClassCompletionEnvironment(len(actions[0]), sandbox=sandbox)
    outcomes = environment.score(items, actions, [()] * len(items))
    return {metric: np.array([outcome.metrics[metric] for outcome in outcomes]) for metric in METRICS}


def cut(text: str, tokenizer: PreTrainedTokenizerBase, limit: int) -> str:
    return tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids[:limit])


if __name__ == "__main__":
    main()

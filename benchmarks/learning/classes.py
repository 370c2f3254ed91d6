"""
How well two untrained agents on Qwen2.5-Coder-0.5B-Instruct complete classes beside one, at an equal wait.

    python -m benchmarks.learning.classes --folder runs --model path.gguf   # ClassEval, what is not there yet
    python -m benchmarks.learning.classes --smoke                           # seconds: whether it runs

Of the team, each agent writes some methods of a class; the single agent writes all. Everybody answers once, greedily,
to the prompts of recipes/class_completion. Agents of a team answer at the same time, so one waits for the longer
answer. What a greedy policy writes within a limit is the beginning of its longest answer: every answer is cut at each
limit and scored again. Intervals (95 %) of the differences are Student's, over classes.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.learning.coder import episodes_of
from benchmarks.team_run import byte_tokenizer, machine, save_model
from trl_multiagent.cli import TASKS
from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.evaluation.statistics import t_interval
from trl_multiagent.models.gguf import converted
from trl_multiagent.runs.evaluation import run_evaluation
from trl_multiagent.tasks.class_completion import ClassCompletionEnvironment, load_class_dataset


POLICIES = {"classes_team": "magrpo_classeval_config", "classes_alone": "grpo_classeval_config"}
LIMITS = (64, 96, 128, 192, 256, 384, 512)  # tokens of an answer
METRICS = {"earned_reward": "tests of single methods", "tests_passed": "all tests", "passed": "solved"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-0.5B-Instruct", help="its name, folder or GGUF file")
    parser.add_argument("--split", default="test", help="classes of ClassEval")
    parser.add_argument("--smoke", action="store_true", help="seconds: two classes and a tiny random model")
    parser.add_argument("--folder", type=Path, help="where the answers are kept; by default they are removed")
    parser.add_argument("--output", type=Path, default=Path("classes.json"), help="where the JSON goes")
    options = parser.parse_args()
    limits = LIMITS[:1] if options.smoke else LIMITS
    with tempfile.TemporaryDirectory() as temporary, Sandbox() as sandbox:
        folder = options.folder or Path(temporary)
        if options.smoke:
            save_model(folder / "model", hidden_size=64, num_layers=1)
            byte_tokenizer().save_pretrained(folder / "model")
            options.model, options.split = str(folder / "model"), "test[2:4]"
        items = load_class_dataset("classeval", options.split, sandbox).to_list()
        for name, config in POLICIES.items():
            answer(name, config, options, folder, limits[-1])
        tokenizer = AutoTokenizer.from_pretrained(converted(options.model, weights=False))
        found = {
            name: {limit: scored(items, episodes_of(folder / name), tokenizer, limit, sandbox) for limit in limits}
            for name in POLICIES
        }
        waits = {name: waited_for(episodes_of(folder / name)) for name in POLICIES}
    numbers: dict[str, Any] = {"machine": machine(), "classes": len(items), "waited for": waits}
    for metric, title in METRICS.items():
        print(f"\n| {title}, {len(items)} classes | {' | '.join(f'{limit} tokens' for limit in limits)} |")
        print(f"| {' | '.join(['---'] * (len(limits) + 1))} |")
        for name in POLICIES:
            numbers[f"{name}, {title}"] = means = [found[name][limit][metric].mean() for limit in limits]
            print(f"| `{name}` | {' | '.join(f'{mean:.3f}' for mean in means)} |")
        cells = []
        for limit in limits:
            difference = np.subtract(*(found[name][limit][metric] for name in POLICIES))
            low, high = t_interval(difference, 0.95)
            cells.append(f"{difference.mean():+.3f} [{low:.3f}, {high:.3f}]")
        print(f"| difference | {' | '.join(cells)} |")
    for name, wait in waits.items():
        print(f"{name}: one waits for {wait:.0f} tokens")
    options.output.write_text(json.dumps(numbers, indent=2) + "\n")


def answer(name: str, config: str, options: argparse.Namespace, folder: Path, limit: int) -> None:
    """Lets a policy answer to all classes once, unless it has."""
    if (folder / name / "evaluation.json").is_file():
        return
    section = config.split("_")[0]
    changes = [f"agent_model.name={options.model}", f"dataset.eval_split={options.split}", f"{section}.num_turns=1"]
    sampling = ["--num_episodes", "1", "--temperature", "0", "--max_completion_length", str(limit)]
    arguments = [options.model, "--task", "class_completion", "--config", config, "--override", *changes, *sampling]
    run_evaluation(TASKS, [*arguments, "--output_dir", str(folder / name)], "benchmark")


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


def waited_for(episodes: list[dict[str, Any]]) -> float:
    """Returns the mean length of the longest answer, in tokens."""
    return float(np.mean([max(episode["turns"][0]["tokens"].values()) for episode in episodes]))


if __name__ == "__main__":
    main()

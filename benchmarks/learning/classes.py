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

from benchmarks.learning.coder import difference_of, episodes_of, evaluate, head_of, tokens_of
from benchmarks.team_run import byte_tokenizer, machine, save_model
from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.models.gguf import converted
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
            if not (folder / name / "evaluation.json").is_file():
                evaluate(options.model, changes_of(config, options), limits[-1], folder / name)
        episodes = {name: episodes_of(folder / name) for name in POLICIES}
        tokenizer = AutoTokenizer.from_pretrained(converted(options.model, weights=False))
        found = {
            name: [scored(items, episodes[name], tokenizer, limit, sandbox) for limit in limits] for name in POLICIES
        }
    waits = {name: tokens_of(episodes[name]).mean() for name in POLICIES}
    numbers: dict[str, Any] = {"machine": machine(), "classes": len(items), "waited for": waits}
    for metric, title in METRICS.items():
        print("", *head_of(f"{title}, {len(items)} classes", *[f"{limit} tokens" for limit in limits]), sep="\n")
        for name in POLICIES:
            numbers[f"{name}, {title}"] = means = [scores[metric].mean() for scores in found[name]]
            print(f"| `{name}` | {' | '.join(f'{mean:.2f}' for mean in means)} |")
        pairs = zip(*found.values(), strict=True)
        print(f"| difference | {' | '.join(difference_of(team[metric], alone[metric]) for team, alone in pairs)} |")
    for name, wait in waits.items():
        print(f"{name}: one waits for {wait:.0f} tokens")
    options.output.write_text(json.dumps(numbers, indent=2) + "\n")


def changes_of(config: str, options: argparse.Namespace) -> list[str]:
    """Returns the arguments that choose a configuration, with the model and the classes."""
    changes = [f"agent_model.name={options.model}", f"dataset.eval_split={options.split}"]
    changes.append(f"{config.split('_')[0]}.num_turns=1")
    return ["--task", "class_completion", "--config", config, "--override", *changes]


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

"""
What two agents on Qwen2.5-Coder-0.5B-Instruct learn about writing code together, on held-out problems.

    python -m benchmarks.learning.coder --folder runs                     # every row that is not there yet
    python -m benchmarks.learning.coder small_untrained small_trained --folder runs
    python -m benchmarks.learning.coder --model path.gguf --arguments max_steps=10 --folder runs
    python -m benchmarks.learning.coder --show --folder runs              # the table as far as it is measured
    python -m benchmarks.learning.coder --answers 10 --show --folder runs # with answers before and after
    python -m benchmarks.learning.coder he_trained --sampled --folder runs # also with four sampled answers
    python -m benchmarks.learning.coder --smoke                           # seconds: whether it runs

A row is a policy. Rows `small_*` answer to the first 32 held-out problems of the demo. `small_untrained` is the
untrained team with the prompts of recipes/code_generation/prompts.py, and `small_published` with the published
prompts. `small_trained` is the former after `magrpo_demo_coder`, also with two more seeds. `small_rank_1` has adapters
of rank 1, also with three seeds, and `small_demo` is the first of them as `make demo-code` shows it. `small_slow` has
learned at a third of the rate, twice as long; `small_iac` and `small_madpo` are the team after `iac_demo_coder` and
`madpo_demo_coder`, and `small_marlhf` after `marlhf_demo_coder`, from the preferences of `small_madpo`. In
`small_in_order`, main reads aux's helper before it answers, and `small_in_order_trained` is this team after ten steps,
also with another seed.
`small_alone` and `small_alone_trained` are one agent that is shown the same solved problems with both functions,
`small_alone_plain` and `small_alone_plain_trained` one that is shown a single function for each.

Rows without `small_`, `he_` and `mbpp_` answer to 16 held-out problems of CoopHumanEval. `published` and `untrained`
are the untrained team with the published prompts and with ours, and `trained` is the latter after `magrpo_che_coder`;
in `in_order`, main reads the helper; `alone` and `alone_trained` are one agent; `moved` is the team of
`small_trained`, and `after_small` this team after ten steps on the problems of CoopHumanEval, at twice the rate of its
configuration. Rows `he_*` are the same for 32 problems of HumanEval, with three seeds, and `mbpp_*` for 32 of MBPP,
where the `fast` ones learn at twice the rate of their configurations.

All answer greedily, once a turn, with `--sampled` also four times at a temperature of 0.2. Both rewards are computed
from the same answers, and for teams also without the text of `aux`. Intervals (95 %) are over problems; intervals of
differences are Student's, over the differences of each problem.

A training that was interrupted goes on from its last checkpoint. `--arguments` go to the trainers, and make no
difference to rows that are there. A row that is not there is marked.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.team_run import byte_tokenizer, machine, save_model
from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.configs.recipes.code_generation.demo import TRAINED, copy_for
from trl_multiagent.configs.recipes.demo.problems import demo_dataset
from trl_multiagent.evaluation.statistics import t_interval
from trl_multiagent.folders import LOG_FILE
from trl_multiagent.report.run_page import read_lines
from trl_multiagent.runs.evaluation import run_evaluation
from trl_multiagent.runs.run import run_recipe
from trl_multiagent.tasks.code_generation import CodeGenerationEnvironment, load_code_dataset


# Name of each row -> its configuration, its changes, and whether it is trained, or the row or the folder of the team
Rows = dict[str, tuple[str, list[str], bool | str | Path]]
FIRST = ["dataset.eval_split=test[:32]"]
PLAIN = "prompt_files.main=trl_multiagent.configs.recipes.code_generation.prompts:list_plain"
PUBLISHED = ["prompt_files.aux=null", "prompt_files.main=null"]
RUNS = "FOLDER"  # in a change: the folder of all rows
AFTER_SMALL = ["peft=null", f"agent_model.name={RUNS}/small_trained/run", "magrpo.learning_rate=2.0e-4"]
AFTER_SMALL += ["magrpo.max_steps=10", "magrpo.per_device_train_batch_size=8"]
HUMANEVAL = ["dataset.name=humaneval", "dataset.train_split=test[33:163]", "dataset.eval_split=test[:32]"]
HUMANEVAL += ["grpo.max_completion_length=160"]
TWO_TURNS = ["magrpo.num_turns=2", "magrpo.branching=episodes"]
IN_ORDER = [*TWO_TURNS, "--task", "trl_multiagent.configs.recipes.code_generation.in_order:TASK"]
COLLECTED = f"marlhf.preference_dataset={RUNS}/small_madpo/run/_preferences"  # what MADPO has learned from
ROWS: Rows = {
    "small_untrained": ("magrpo_demo_coder", FIRST, False),
    "small_trained": ("magrpo_demo_coder", FIRST, True),
    "small_trained_2": ("magrpo_demo_coder", [*FIRST, "seed=2"], True),
    "small_trained_3": ("magrpo_demo_coder", [*FIRST, "seed=3"], True),
    "small_rank_1": ("magrpo_demo_coder", [*FIRST, "peft.r=1"], True),
    "small_rank_1_2": ("magrpo_demo_coder", [*FIRST, "peft.r=1", "seed=2"], True),
    "small_rank_1_3": ("magrpo_demo_coder", [*FIRST, "peft.r=1", "seed=3"], True),
    "small_demo": ("magrpo_demo_coder", FIRST, TRAINED),
    "small_alone": ("grpo_demo_coder", FIRST, False),
    "small_alone_trained": ("grpo_demo_coder", FIRST, True),
    "small_alone_plain": ("grpo_demo_coder", [*FIRST, PLAIN], False),
    "small_alone_plain_trained": ("grpo_demo_coder", [*FIRST, PLAIN], True),
    "small_published": ("magrpo_demo_coder", [*FIRST, *PUBLISHED], False),
    "small_slow": (
        "magrpo_demo_coder",
        [*FIRST, "magrpo.learning_rate=1.0e-4", "magrpo.max_steps=20"],
        True,
    ),
    "small_iac": ("iac_demo_coder", FIRST, True),
    "small_madpo": ("madpo_demo_coder", FIRST, True),
    "small_marlhf": ("marlhf_demo_coder", [*FIRST, COLLECTED], True),
    "small_two_turns": ("magrpo_demo_coder", [*FIRST, *TWO_TURNS], False),
    "small_two_turns_trained": ("magrpo_demo_coder", [*FIRST, *TWO_TURNS], True),
    "small_in_order": ("magrpo_demo_coder", [*FIRST, *IN_ORDER], False),
    "small_in_order_trained": ("magrpo_demo_coder", [*FIRST, *IN_ORDER], True),
    "small_in_order_trained_2": ("magrpo_demo_coder", [*FIRST, "seed=2", *IN_ORDER], True),
    "published": ("magrpo_che_coder", PUBLISHED, False),
    "untrained": ("magrpo_che_coder", [], False),
    "in_order": ("magrpo_che_coder", IN_ORDER, False),
    "trained": ("magrpo_che_coder", [], True),
    "alone": ("grpo_mbpp_coder", ["dataset.name=coophumaneval", "dataset.eval_split=[:16]"], False),
    "alone_trained": (
        "grpo_mbpp_coder",
        ["dataset.name=coophumaneval", "dataset.train_split=[48:]", "dataset.eval_split=[:16]"],
        True,
    ),
    "moved": ("magrpo_che_coder", [], "small_trained"),
    "after_small": ("magrpo_che_coder", AFTER_SMALL, True),
    "he_published": ("magrpo_he_coder", PUBLISHED, False),
    "he_untrained": ("magrpo_he_coder", [], False),
    "he_trained": ("magrpo_he_coder", [], True),
    "he_trained_2": ("magrpo_he_coder", ["seed=2"], True),
    "he_trained_3": ("magrpo_he_coder", ["seed=3"], True),
    "he_alone": ("grpo_mbpp_coder", HUMANEVAL, False),
    "he_alone_trained": ("grpo_mbpp_coder", HUMANEVAL, True),
    "mbpp_published": ("magrpo_mbpp_coder", [*FIRST, *PUBLISHED], False),
    "mbpp_untrained": ("magrpo_mbpp_coder", FIRST, False),
    "mbpp_trained": ("magrpo_mbpp_coder", FIRST, True),
    "mbpp_fast": ("magrpo_mbpp_coder", [*FIRST, "magrpo.learning_rate=2.0e-4"], True),
    "mbpp_moved": ("magrpo_mbpp_coder", FIRST, "small_trained"),
    "mbpp_moved_2": ("magrpo_mbpp_coder", FIRST, "small_trained_2"),
    "mbpp_moved_rank_1": ("magrpo_mbpp_coder", FIRST, "small_rank_1"),
    "mbpp_moved_rank_1_3": ("magrpo_mbpp_coder", FIRST, "small_rank_1_3"),
    "mbpp_moved_iac": ("magrpo_mbpp_coder", FIRST, "small_iac"),
    "mbpp_alone": ("grpo_mbpp_coder", FIRST, False),
    "mbpp_alone_moved": ("grpo_mbpp_coder", FIRST, "small_alone_trained"),
    "mbpp_alone_trained": ("grpo_mbpp_coder", FIRST, True),
    "mbpp_alone_fast": ("grpo_mbpp_coder", [*FIRST, "grpo.learning_rate=2.0e-4"], True),
}
ITEMS = {  # which the rows with a prefix answer to
    "small_": lambda: demo_dataset("test[:32]"),
    "he_": lambda: load_code_dataset("humaneval", "test[:32]"),
    "mbpp_": lambda: load_code_dataset("mbpp", "test[:32]"),
    "": lambda: load_code_dataset("coophumaneval", "[:16]"),
}
SEEDS = ("", "_2", "_3")  # the ends of the names of rows with seeds 1, 2 and 3
COMPARED = (
    *(("small_untrained", f"small_trained{seed}") for seed in SEEDS),
    *(("small_untrained", f"small_rank_1{seed}") for seed in SEEDS),
    ("small_untrained", "small_demo"),
    ("small_alone", "small_alone_trained"),
    ("small_alone_plain", "small_alone_plain_trained"),
    *((f"small_alone{kind}_trained", f"small_trained{s}") for kind in ("", "_plain") for s in SEEDS),
    ("small_published", "small_untrained"),
    ("small_untrained", "small_slow"),
    ("small_untrained", "small_iac"),
    ("small_untrained", "small_madpo"),
    ("small_untrained", "small_marlhf"),
    ("small_two_turns", "small_two_turns_trained"),
    ("small_trained", "small_two_turns_trained"),
    *(("small_in_order", f"small_in_order_trained{seed}") for seed in ("", "_2")),
    ("small_trained", "small_in_order_trained"),
    ("published", "untrained"),
    ("untrained", "trained"),
    ("untrained", "moved"),
    ("moved", "after_small"),
    ("untrained", "after_small"),
    ("alone", "alone_trained"),
    ("alone_trained", "trained"),
    ("he_published", "he_untrained"),
    *(("he_untrained", f"he_trained{seed}") for seed in SEEDS),
    ("he_alone", "he_alone_trained"),
    ("he_alone", "he_untrained"),
    *(("he_alone_trained", f"he_trained{seed}") for seed in SEEDS),
    ("mbpp_published", "mbpp_untrained"),
    ("mbpp_alone", "mbpp_untrained"),
    *(("mbpp_untrained", f"mbpp_{kind}") for kind in ("trained", "fast")),
    *(("mbpp_untrained", f"mbpp_moved{team}") for team in ("", "_2", "_rank_1", "_rank_1_3", "_iac")),
    *(("mbpp_alone", f"mbpp_alone_{kind}") for kind in ("trained", "fast")),
    ("mbpp_alone", "mbpp_alone_moved"),
    *((f"mbpp_alone_{kind}", f"mbpp_{kind}") for kind in ("trained", "fast")),
)
# Over three seeds
MEANS = (("small_untrained", "small_trained"), ("small_untrained", "small_rank_1"), ("he_untrained", "he_trained"))
# The folder of each evaluation in the folder of its row -> how the answers are sampled
GREEDY = {".": ["--num_episodes", "1", "--temperature", "0"]}
SAMPLED = {"sampled": ["--num_episodes", "4", "--temperature", "0.2"]}
LENGTHS = (24, 28, 32, 40, 48, 64)  # of the tokens that one waits for
METRICS = {
    "paper_reward": "published",
    "earned_reward": "earned",
    "passed": "pass@1",
    "test_pass_rate": "tests passed",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--tokens", type=int, help="longest answer of an evaluation (default: as in training)")
    parser.add_argument("--answers", type=int, default=0, help="answers to show, before and after the training")
    parser.add_argument("--sampled", action="store_true", help="evaluate with four sampled answers, too")
    options = parse_rows(parser, ROWS, "coder.json")
    with tempfile.TemporaryDirectory() as temporary:
        folder, rows = options.folder or Path(temporary), ROWS
        if options.smoke:
            options.model, options.tokens = chat_model(folder / "model"), 4
            options.rows = ["small_untrained", "small_trained"]
            options.arguments += ["max_steps=1", "max_completion_length=4", "items_per_device=1", "num_generations=2"]
            rows = {
                name: (config, ["dataset.eval_split=test[:2]"], trained) for name, (config, _, trained) in ROWS.items()
            }
        for row in () if options.show else options.rows:
            measure(row, rows, options, folder, GREEDY | SAMPLED if options.sampled else GREEDY)
        found = {row: episodes_of(folder / row) for row in ROWS}
        drawn = {row: episodes_of(folder / row / name) for name in SAMPLED for row in ROWS}
        tables = [table(found, folder), sampled(drawn), chains(found), cut(found), courses(folder), differences(found)]
        for lines in tables:
            print(*lines, "", sep="\n")
        for kind in ("small_", "", "he_", "mbpp_"):
            pairs = [*zip(found[f"{kind}untrained"], found[f"{kind}trained"], strict=False)]
            for before, after in pairs[: options.answers]:
                task = " ".join(before["turns"][0]["prompts"]["main"][-1]["content"].split()).partition(". ")[0] + "."
                lines = ["", f"### {before['name']}", "", task, *answer("Before", before), *answer("After", after)]
                print("\n".join(lines))
        numbers = {row: {name: values(found[row], name).tolist() for name in METRICS} for row in ROWS}
    options.output.write_text(json.dumps({"machine": machine(), "rows": numbers}, indent=2) + "\n")


def parse_rows(parser: argparse.ArgumentParser, rows: Rows, output: str) -> argparse.Namespace:
    """Reads the arguments of a benchmark with rows: those that all such benchmarks have, and its own."""
    parser.add_argument("rows", nargs="*", metavar="ROW", default=[*rows], help=f"rows: {', '.join(rows)}")
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-0.5B-Instruct", help="its name, folder or GGUF file")
    parser.add_argument("--arguments", nargs="+", default=[], metavar="KEY=VALUE", help="arguments of the trainers")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--smoke", action="store_true", help="seconds: a tiny random model")
    parser.add_argument("--folder", type=Path, help="where the runs go; by default they are removed")
    parser.add_argument("--output", type=Path, default=Path(output), help="where the JSON goes")
    options = parser.parse_args()
    if unknown := {*options.rows} - {*rows}:
        parser.error(f"no row {unknown.pop()!r}: there are {', '.join(rows)}")
    if not options.output.absolute().parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")
    return options


def chat_model(folder: Path) -> str:
    """Saves a tiny random model that takes chats, and returns its folder."""
    save_model(folder, hidden_size=64, num_layers=1)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}<eos>{% endfor %}"
    tokenizer.save_pretrained(folder)
    return str(folder)


def measure(
    row: str, rows: Rows, options: argparse.Namespace, folder: Path, evaluations: dict[str, list[str]] = GREEDY
) -> None:
    """Trains and evaluates a row, as far as it is not there."""
    config, changes, trained = rows[row]
    run, section = folder / (trained if isinstance(trained, str) else row) / "run", config.split("_")[0]
    outputs = {folder / row / name: sampling for name, sampling in evaluations.items()}
    missing = {output: sampling for output, sampling in outputs.items() if not (output / "evaluation.json").is_file()}
    if not missing:
        return
    if not any(change.startswith("agent_model.name") for change in changes):
        changes = [f"agent_model.name={options.model}", *changes]
    changes = ["--config", config, "--override", *(change.replace(RUNS, str(folder)) for change in changes)]
    if trained is True and not (run / "team.json").is_file():
        arguments = [*options.arguments, f"output_dir={run}", "disable_tqdm=true"]
        own = [f"{section}.{argument}" for argument in arguments]
        run_recipe(section, None, [*changes, "--override", *own, "--resume_from_checkpoint", "auto"], "coder")
    if isinstance(trained, Path):
        copy_for(options.model, trained, run)
    team = str(run) if trained else options.model
    length = ["--max_completion_length", str(options.tokens)] if options.tokens else []  # by default, as in training
    for output, sampling in missing.items():
        run_evaluation(None, [team, *changes, *sampling, *length, "--output_dir", str(output)], "coder")


def episodes_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the episodes of an evaluation, without any if it is not there."""
    lines = [line for path in folder.glob("transcripts/*/transcripts.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines] if (folder / "evaluation.json").is_file() else []


def values(episodes: list[dict[str, Any]], metric: str) -> np.ndarray:
    """Returns a metric of each episode's last turn; 0 for one that an agent alone does not have."""
    return np.array([episode["turns"][-1]["metrics"].get(metric, 0.0) for episode in episodes])


def tokens_of(episodes: list[dict[str, Any]], kind: Any = max) -> np.ndarray:
    """Returns the tokens that one waits for in each episode, where agents answer at the same time, or their `sum`."""
    return np.array([sum(kind(turn["tokens"].values()) for turn in episode["turns"]) for episode in episodes])


def solved_within(episodes: list[dict[str, Any]], tokens: int) -> np.ndarray:
    """Returns whether each problem is solved by an answer for which one waits no longer than a number of tokens."""
    return (values(episodes, "passed") == 1) & (tokens_of(episodes) <= tokens)


def table(found: dict[str, list[dict[str, Any]]], folder: Path) -> list[str]:
    """Returns the table as Markdown."""
    head = [*METRICS.values(), "parses", "aux defined", "used", "size share", "tokens", "longest chain", "steps"]
    lines = head_of("row", *head)
    for row, episodes in found.items():
        cells = row_of(episodes, folder / row) if episodes else ["not measured"] + [""] * (len(head) - 1)
        lines.append(f"| `{row}` | {' | '.join(cells)} |")
    return lines


def row_of(episodes: list[dict[str, Any]], folder: Path) -> list[str]:
    """Returns the cells of a row."""
    (policy,) = json.loads((folder / "evaluation.json").read_text())["policies"].values()
    results = [policy["results"]["final"][metric] for metric in METRICS]
    cells = [f"{x['mean']:.2f} [{x['low']:.2f}, {x['high']:.2f}]" for x in results]
    used, is_team = values(episodes, "collab_aux_usage") > 0, "size_share" in episodes[0]["turns"][-1]["metrics"]
    defined = np.array(["def aux(" in x["turns"][-1]["completions"].get("aux", "") for x in episodes])
    shares = [values(episodes, "syntax_valid_rate").mean()]
    shares += [defined.mean(), used.mean(), values(episodes, "size_share").mean()] if is_team else []
    counts = [f"{tokens_of(episodes, kind).mean():.0f}" for kind in (sum, max)]
    steps = max((int(path.name.split("-")[1]) for path in folder.glob("run/checkpoint-*")), default=0)
    return [*cells, *[f"{x:.2f}" for x in shares], *[""] * (4 - len(shares)), *counts, str(steps)]


def head_of(*titles: str) -> list[str]:
    """Returns the first two lines of a table in Markdown."""
    return [f"| {' | '.join(titles)} |", f"| {' | '.join(['---'] * len(titles))} |"]


def difference_of(after: np.ndarray, before: np.ndarray) -> str:
    """Returns the mean difference of each problem, with its interval if the differences are not all the same."""
    difference = np.subtract(after, before, dtype=float)
    low, high = t_interval(difference, 0.95)
    return f"{difference.mean():+.2f}" + ("" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]")


def sampled(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Returns, as Markdown, the means of the sampled answers, and the differences of each problem's means."""
    lines = head_of("sampled, row", *METRICS.values())
    means = {
        row: {name: values(episodes, name).reshape(-1, 4).mean(axis=1) for name in METRICS}
        for row, episodes in found.items()
        if episodes
    }
    for row, of in means.items():
        lines.append(f"| `{row}` | {' | '.join(f'{of[name].mean():.2f}' for name in METRICS)} |")
    for before, after in COMPARED:
        if before in means and after in means:
            cells = [difference_of(means[after][name], means[before][name]) for name in METRICS]
            lines.append(f"| `{after}` - `{before}` | {' | '.join(cells)} |")
    for before, after in MEANS:
        if {before, *(f"{after}{seed}" for seed in SEEDS)} <= means.keys():
            mean = {name: np.mean([means[f"{after}{seed}"][name] for seed in SEEDS], axis=0) for name in METRICS}
            cells = [difference_of(mean[name], means[before][name]) for name in METRICS]
            lines.append(f"| mean of `{after}` - `{before}` | {' | '.join(cells)} |")
    return lines


def chains(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Returns, as Markdown, the share of problems that each policy solves within a number of tokens."""
    lines = head_of("solved within", *[f"{length} tokens" for length in LENGTHS])
    for row, episodes in found.items():
        if episodes:
            shares = [f"{solved_within(episodes, length).mean():.2f}" for length in LENGTHS]
            lines.append(f"| `{row}` | {' | '.join(shares)} |")
    return lines


def cut(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Returns, as Markdown, what the last answers of each team are worth if the text of `aux` is cut."""
    names = ("earned_reward", "passed", "test_pass_rate")
    lines = head_of("`aux` cut", *[title for name in names for title in (METRICS[name], "difference")])
    with Sandbox() as sandbox:
        environment = CodeGenerationEnvironment(sandbox=sandbox)
        for row, episodes in found.items():
            if not episodes or len(episodes[0]["turns"][-1]["completions"]) < 2:
                continue
            items = next(load for prefix, load in ITEMS.items() if row.startswith(prefix))().to_list()[: len(episodes)]
            actions = [{**episode["turns"][-1]["completions"], "aux": ""} for episode in episodes]
            outcomes = environment.evaluate(items, actions, [()] * len(items))
            cells = []
            for name in names:
                alone = np.array([outcome.metrics[name] for outcome in outcomes])
                cells += [f"{alone.mean():.2f}", difference_of(alone, values(episodes, name))]
            lines.append(f"| `{row}` | {' | '.join(cells)} |")
    return lines


def courses(folder: Path) -> list[str]:
    """Returns, as Markdown, the mean reward of the answers that are sampled in each fifth of a training."""
    lines = head_of("reward in the training", *["a fifth of the steps"] * 5)
    for row in ROWS:
        log = read_lines(folder / row / "run" / LOG_FILE)  # empty if there is none
        rewards = [entry["reward"] for entry in log if "turn_1/passed" in entry]
        if len(rewards) >= 5:
            means = [f"{part.mean():.2f}" for part in np.array_split(rewards, 5)]
            lines.append(f"| `{row}` | {' | '.join(means)} |")
    return lines


def differences(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Returns the differences of the rows that are there, with their intervals."""
    lines = []
    for before, after in COMPARED:
        for metric, name in METRICS.items() if found[before] and found[after] else ():
            difference = difference_of(*(values(found[row], metric) for row in (after, before)))
            lines.append(f"{after} - {before}, {name}: {difference}")
        # The claim of a team is time, so its comparison with one agent is made at equal waiting
        for length in LENGTHS if "alone" in before and found[before] and found[after] else ():
            difference = difference_of(*(solved_within(found[row], length) for row in (after, before)))
            lines.append(f"{after} - {before}, within {length} tokens: {difference}")
    for before, after in MEANS:
        trained = [found[f"{after}{seed}"] for seed in SEEDS]
        for metric, name in METRICS.items() if found[before] and all(trained) else ():
            mean = np.mean([values(episodes, metric) for episodes in trained], axis=0)
            lines.append(f"mean of {after} - {before}, {name}: {difference_of(mean, values(found[before], metric))}")
    return lines


def answer(when: str, episode: dict[str, Any]) -> list[str]:
    """Returns the functions of an episode and what they earn, as Markdown."""
    (turn,) = episode["turns"]
    metrics = turn["metrics"]
    told = f"{when}: {metrics['test_pass_rate']:.0%} of the tests passed, `earned` {metrics['earned_reward']:.1f}"
    code = [text.replace("```", "").strip() for text in turn["completions"].values()]
    return ["", told, "", "```text", "\n\n".join(code), "```"]


if __name__ == "__main__":
    main()

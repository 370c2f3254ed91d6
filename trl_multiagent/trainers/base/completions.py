"""Shows completions of some trees in the terminal."""

import difflib
import random
import textwrap
from collections import defaultdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trl_multiagent.console import printable
from trl_multiagent.report.trees import trees_of
from trl_multiagent.rollout.trace import TraceRow, roles_of


NUM_TREES = 3
PROMPT_LINES = 6
LATER_PROMPT_LINES = 2
COMPLETION_LINES = 10
LABEL_WIDTH = 20


def print_trees(rows: list[TraceRow], num_trees: int | None = None, console: Console | None = None) -> None:
    """
    Prints one branch each of the best tree of a batch, the worst one, and some others. `num_trees` is 3 by default.
    """
    console, trees = console or Console(), trees_of(rows)
    chosen = choose_trees(trees, NUM_TREES if num_trees is None else num_trees, rows[0]["step"])
    if not chosen:
        return
    rewards = [row["reward"] for row in rows]
    heading = f"Step {rows[0]['step']} ({rows[0]['split']}): {len(trees)} trees, {len(rows)} joint actions, reward "
    heading += f"{sum(rewards) / len(rewards):.2f} ({min(rewards):.2f} to {max(rewards):.2f})"
    console.print(Text(heading, style="bold"))
    for name, tree in chosen:
        console.print(tree_table(name, branch_of(tree, name), tree, console.width))


def choose_trees(trees: list[list[TraceRow]], number: int, seed: int) -> list[tuple[str, list[TraceRow]]]:
    """Returns the best and the worst tree, and then random ones, each with its name."""
    ranked = sorted(trees, key=root_return, reverse=True)
    chosen = [("best", ranked[0])]
    if len(ranked) > 1:
        chosen.append(("worst", ranked[-1]))
    # Not the global generator, which the rollouts use
    others = random.Random(seed).sample(ranked[1:-1], max(0, min(number - 2, len(ranked) - 2)))
    return [*chosen, *(("random", tree) for tree in others)][: max(0, number)]


def root_return(tree: list[TraceRow]) -> float:
    """Returns the mean return of a tree's first joint actions."""
    returns = [row["return"] for row in tree if row["turn"] == 1]
    return sum(returns) / len(returns)


def branch_of(tree: list[TraceRow], name: str) -> list[TraceRow]:
    """
    Returns one row per turn: the joint actions with the highest return, with the lowest, or random ones. In episodes,
    a branch is an episode.
    """
    if "episode" in tree[0]:
        roots = {row["episode"]: row["return"] for row in tree if row["turn"] == 1}
        chosen = random.Random(tree[0]["step"]).choice([*roots])
        if name != "random":
            chosen = (max if name == "best" else min)(roots, key=lambda episode: roots[episode])
        return [row for row in tree if row["episode"] == chosen]
    nodes: defaultdict[str, list[TraceRow]] = defaultdict(list)
    for row in tree:
        nodes[row["node"]].append(row)
    rng = random.Random(tree[0]["step"])
    branch: list[TraceRow] = []
    path = "/"
    while path in nodes:
        continued = [row for row in nodes[path] if child_of(row) in nodes]  # in a chain, one joint action
        candidates = continued or nodes[path]
        if name == "random":
            branch.append(rng.choice(candidates))
        else:
            branch.append((max if name == "best" else min)(candidates, key=lambda row: row["return"]))
        path = child_of(branch[-1])
    return branch


def child_of(row: TraceRow) -> str:
    """Returns the path of the node after a joint action."""
    return f"{row['node'].rstrip('/')}/{row['action']}"


def tree_table(name: str, branch: list[TraceRow], tree: list[TraceRow], console_width: int) -> Table:
    """Makes a table of one branch of a tree: a line of prompts, then a line per turn, with a column per role."""
    roles = roles_of(branch)
    width = max(10, (console_width - LABEL_WIDTH - 4) // len(roles) - 3)
    title = f"{name} tree, item {printable(str(branch[0]['item']))}, mean return {root_return(tree):.2f}"
    table = Table(title=Text(title), title_justify="left", show_lines=True, width=console_width)
    table.add_column("", width=LABEL_WIDTH)
    for role in roles:
        table.add_column(Text(role, style="bold"), ratio=1)
    prompts = [cut(lines_of(branch[0][f"prompt/{role}"] or ""), width, PROMPT_LINES) for role in roles]
    table.add_row(Text("prompt"), *prompts)
    for last, row in zip([None, *branch[:-1]], branch, strict=True):
        rewards = [other["reward"] for other in tree if other["node"] == row["node"]]
        label = f"turn {row['turn']}\nreward {row['reward']:.2f}\nreturn {row['return']:.2f}"
        label += "".join(f"\n{role} {row[f'reward/{role}']:.2f}" for role in roles if f"reward/{role}" in row)
        if len(rewards) > 1:
            label += f"\nsiblings {min(rewards):.2f}\n      to {max(rewards):.2f}"
        table.add_row(Text(label), *(completion_cell(row, last, role, width) for role in roles))
    return table


def completion_cell(row: TraceRow, last: TraceRow | None, role: str, width: int) -> Text:
    """
    Shows an agent's completion and advantage; after the first turn, also the start of its new prompt and the changes
    of its answer.
    """
    cell = Text()
    if row[f"completion/{role}"] is None:
        return Text("(does not act)", "dim")
    lines = lines_of(row[f"completion/{role}"])
    if last is not None:
        prompt = lines_of(row[f"prompt/{role}"])
        cell.append_text(cut([(line, "dim") for line, _ in prompt], width, LATER_PROMPT_LINES)).append("\n")
        if last[f"completion/{role}"] is not None:
            lines = changes(last[f"completion/{role}"], row[f"completion/{role}"])
    cell.append_text(cut(lines, width, COMPLETION_LINES))
    advantage = row[f"advantage/{role}"]
    if advantage is not None:
        cell.append(f"\nadvantage {advantage:+.2f}", "magenta")
    return cell


def lines_of(text: str) -> list[tuple[str, str]]:
    """Splits a text into lines, each with its style."""
    return [(line, "") for line in printable(text.expandtabs(4)).split("\n")]


def changes(old: str, new: str) -> list[tuple[str, str]]:
    """Returns the removed and added lines, or the new text if it is shorter."""
    if old == new:
        return [("(unchanged)", "dim")]
    before, after = ([line for line, _ in lines_of(text)] for text in (old, new))
    diff = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    if len(diff) >= len(after):
        return lines_of(new)
    return [(line, "green" if line[0] == "+" else "red") for line in diff]


def cut(lines: list[tuple[str, str]], width: int, number: int) -> Text:
    """Returns the first lines of a text, broken at the width of a column."""
    wrap = textwrap.TextWrapper(width, drop_whitespace=False, break_on_hyphens=False).wrap
    pieces = [(piece, style) for line, style in lines for piece in wrap(line) or [""]]
    text = Text("\n").join(Text(piece, style) for piece, style in pieces[:number])
    if len(pieces) > number:
        text.append(f"\n... {len(pieces) - number} more lines", "dim")
    return text

"""
Two planning games, in which one agent begins and another goes on from what it did: a path on a grid, and a sudoku of
4 x 4 cells, as in [AT-GRPO](https://huggingface.co/papers/2510.11062). A solver makes the items and knows the best
reward, 1.

    trl-multiagent train magrpo --task trl_multiagent.configs.recipes.games.planning:PATH \\
        --model_name Qwen/Qwen2.5-0.5B-Instruct --num_turns 2
    trl-multiagent train magrpo --task trl_multiagent.configs.recipes.games.planning:SUDOKU \\
        --model_name Qwen/Qwen2.5-0.5B-Instruct --num_turns 2
"""

import random
import re

from trl_multiagent import Task, workflow


SIDE, WALLS, BLANKS = 4, 5, 6
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
RANGES = {"reward": (0.0, 1.0)}


# A path


def walk(grid, place, text):
    """Returns the place after the moves in a text, and their number. A move off the grid or into a wall ends it."""
    moves = re.findall(r"[a-z]+", text.lower())
    for number, move in enumerate(moves):
        row, column = (x + step for x, step in zip(place, MOVES.get(move, (SIDE, SIDE)), strict=True))
        if not (0 <= row < SIDE and 0 <= column < SIDE) or grid[row][column] == "#":
            return place, number
        place = (row, column)
    return place, len(moves)


def find(grid, sign):
    return next((row, line.index(sign)) for row, line in enumerate(grid) if sign in line)


def distance(grid):
    """Returns the length of the shortest path from S to G, or `None` if there is none."""
    reached, goal = {find(grid, "S"): 0}, find(grid, "G")
    for place in (waiting := [*reached]):  # it grows
        for move in MOVES:
            after, number = walk(grid, place, move)
            if number and after not in reached:
                reached[after] = reached[place] + 1
                waiting.append(after)
    return reached.get(goal)


@workflow(roles=("planner", "mover"), metric_ranges=RANGES)
async def path(item, agents):
    grid, shown = item["grid"], "\n".join(item["grid"])
    plan = await agents.planner(f"{shown}\nWrite moves from S to G (up, down, left, right). # is a wall:\n")
    place, first = walk(grid, find(grid, "S"), plan)
    lines = [list(line.replace("S", ".")) for line in grid]
    lines[place[0]][place[1]] = "S"
    shown = "\n".join(map("".join, lines))
    place, second = walk(grid, place, await agents.mover(f"{shown}\nWrite the moves that are left from S to G:\n"))
    reached = place == find(grid, "G")
    agents.log("passed", reached)
    return item["shortest"] / (first + second) if reached else 0.0


def grids(number, rng):
    """Draws grids in which G can be reached from S."""
    items = []
    while len(items) < number:
        cells = rng.sample(["S", "G", *"#" * WALLS, *"." * (SIDE * SIDE - WALLS - 2)], SIDE * SIDE)
        grid = ["".join(cells[k : k + SIDE]) for k in range(0, len(cells), SIDE)]
        if (shortest := distance(grid)) is not None:
            items.append({"grid": grid, "shortest": shortest})
    return items


# A sudoku: 16 digits, with 0 for a blank


def clashes(cells, k):
    """Returns whether another cell in the row, column or box of cell k has its digit."""

    def places(x):
        return (x // 4, -1), (-1, x % 4), (x // 8, x % 4 // 2 + 9)

    return any(cells[x] == cells[k] and {*places(x)} & {*places(k)} for x in range(16) if x != k)


def solutions(cells):
    """Yields all ways to fill the blanks."""
    if "0" not in cells:
        yield cells
        return
    k = cells.index("0")
    for digit in "1234":
        filled = cells[:k] + digit + cells[k + 1 :]
        if not clashes(filled, k):
            yield from solutions(filled)


def read(cells, text):
    """Returns the cells with the blanks filled as in a text, which has all cells in order, where this is no clash."""
    digits = "".join(re.findall(r"[0-4]", text))[:16].ljust(16, "0")
    merged = "".join(digit if cell == "0" else cell for cell, digit in zip(cells, digits, strict=True))
    return "".join(merged[k] if cells[k] != "0" or not clashes(merged, k) else "0" for k in range(16))


@workflow(roles=("filler", "finisher"), metric_ranges=RANGES)
async def sudoku(item, agents):
    cells = item["cells"]
    for role in ("filler", "finisher"):
        rows = "\n".join(cells[k : k + 4] for k in range(0, 16, 4))
        cells = read(
            item["cells"], await agents[role](f"{rows}\nA sudoku of 1 to 4. Write it without its blanks, 0:\n")
        )
    blanks = [k for k in range(16) if item["cells"][k] == "0"]
    right = sum(cells[k] == item["solution"][k] for k in blanks)
    agents.log("passed", right == len(blanks))
    return right / len(blanks)


def sudokus(number, rng):
    """Draws sudokus that have one solution."""
    full, items = [*solutions("0" * 16)], []
    while len(items) < number:
        solution, blanks = rng.choice(full), rng.sample(range(16), BLANKS)
        cells = "".join("0" if k in blanks else digit for k, digit in enumerate(solution))
        if len([*solutions(cells)]) == 1:
            items.append({"cells": cells, "solution": solution})
    return items


def task_of(environment, draw):
    def load_datasets(settings):
        from datasets import Dataset

        items = draw(576, random.Random(0))
        held_out = [item for item in items[512:] if item not in items[:512]]
        return Dataset.from_list(items[:512]), Dataset.from_list(held_out)

    return Task(lambda settings: environment, load_datasets, roles=environment.roles)


PATH, SUDOKU = task_of(path, grids), task_of(sudoku, sudokus)

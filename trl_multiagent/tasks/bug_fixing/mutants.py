"""Makes faulty versions of a program by small changes to its syntax tree."""

import ast
import random
from collections.abc import Iterator, Sequence
from typing import Any


# What replaces each operator and function
COMPARISONS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn}
ARITHMETIC = {ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
CALLS = {"min": "max", "any": "all", "upper": "lower"}
TWO_WAYS: dict[Any, Any] = {**COMPARISONS, ast.And: ast.Or, ast.Add: ast.Sub, **CALLS}
REPLACED = {**TWO_WAYS, **{new: old for old, new in TWO_WAYS.items()}, **ARITHMETIC, "append": "remove"}


def changes_of(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """
    Yields the changes that the six operators make to one node, each as a field of the node and its new value. The
    operators change comparisons, arithmetic, integers, `and` and `or`, conditions, and calls.
    """
    if isinstance(node, ast.Compare):
        for k, operator in enumerate(node.ops):
            if type(operator) in REPLACED:
                yield "ops", [*node.ops[:k], REPLACED[type(operator)](), *node.ops[k + 1 :]]
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in REPLACED:
        yield "op", REPLACED[type(node.op)]()
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "value", node.value + 1
        yield "value", node.value - 1
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "test", ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Name) and node.id in REPLACED:
        yield "id", REPLACED[node.id]
    elif isinstance(node, ast.Attribute) and node.attr in REPLACED:
        yield "attr", REPLACED[node.attr]


class Mutants(Sequence[str]):
    """
    All programs that differ from a program in one place, in a fixed order. A few occur twice, for example `x + 0` with
    another constant or operator.

    Args:
        source (`str`): The program.
        entry_point (`str`): The function whose body is changed. Signatures, docstrings and other functions stay.
    """

    def __init__(self, source: str, entry_point: str):
        self.source, self.entry_point = source, entry_point
        nodes = self._read()[1]
        self.places = [(number, k) for number, node in enumerate(nodes) for k, _ in enumerate(changes_of(node))]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        number, k = self.places[index]
        tree, nodes = self._read()
        setattr(nodes[number], *[*changes_of(nodes[number])][k])
        return ast.unparse(tree)

    def shuffled(self, seed: str) -> list[int]:
        """Returns the indices of all mutants in a random order that the seed determines."""
        order = [*range(len(self))]
        random.Random(seed).shuffle(order)
        return order

    def _read(self) -> tuple[ast.Module, list[ast.AST]]:
        """Returns the program as a tree, and the nodes in the body of the function, in a fixed order."""
        tree = ast.parse(self.source)
        functions = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == self.entry_point]
        return tree, [node for statement in functions[-1].body for node in ast.walk(statement)]

"""Makes faulty versions of a program by small changes to its syntax tree."""

import ast
import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
CALLS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "upper": "lower",
    "lower": "upper",
    "append": "remove",
}


def changes_of(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """
    Yields the changes that the six operators make to one node, each as a field of the node and its new value. The operators change
    comparisons, arithmetic, integers, `and` and `or`, conditions, and calls.
    """
    if isinstance(node, ast.Compare):
        for k, operator in enumerate(node.ops):
            if type(operator) in COMPARISONS:
                yield "ops", [*node.ops[:k], COMPARISONS[type(operator)](), *node.ops[k + 1 :]]
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "op", ARITHMETIC[type(node.op)]()
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "value", node.value + 1
        yield "value", node.value - 1
    elif isinstance(node, ast.BoolOp):
        yield "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "test", ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Name) and node.id in CALLS:
        yield "id", CALLS[node.id]
    elif isinstance(node, ast.Attribute) and node.attr in CALLS:
        yield "attr", CALLS[node.attr]


class Mutants(Sequence[str]):
    """
    All programs that differ from a program in one place, in a fixed order. A few occur twice, for example `x + 0` with another constant or
    operator.

    Args:
        source (`str`): The program.
        entry_point (`str`): The function whose body is changed. Signatures, docstrings and other functions stay.
    """

    def __init__(self, source: str, entry_point: str):
        self.tree = ast.parse(source)
        self.entry_point = entry_point
        self.places = [
            (number, k) for number, node in enumerate(self._body(self.tree)) for k, _ in enumerate(changes_of(node))
        ]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        number, k = self.places[index]
        mutant = copy.deepcopy(self.tree)
        node = self._body(mutant)[number]
        setattr(node, *[*changes_of(node)][k])
        return ast.unparse(ast.fix_missing_locations(mutant))

    def shuffled(self, seed: str) -> list[int]:
        """Returns the indices of all mutants in a random order that the seed determines."""
        order = [*range(len(self))]
        random.Random(seed).shuffle(order)
        return order

    def _body(self, tree: ast.Module) -> list[ast.AST]:
        """Returns the nodes in the body of the function, in a fixed order."""
        functions = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == self.entry_point]
        return [node for statement in functions[-1].body for node in ast.walk(statement)]

"""Makes faulty versions of a program by small changes to its syntax tree."""

import ast
import copy
import random
from collections.abc import Iterator
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


def make_mutants(source: str, entry_point: str, seed: int) -> Iterator[str]:
    """
    Yields all programs that differ from a program in one place, each once, in a random order.

    Args:
        source (`str`): The program.
        entry_point (`str`): The function whose body is changed. Signatures, docstrings and other functions stay.
        seed (`int`): The order depends on it and on the program.
    """
    tree = ast.parse(source)
    places = [
        (number, k) for number, node in enumerate(_body(tree, entry_point)) for k, _ in enumerate(changes_of(node))
    ]
    random.Random(f"{seed} {source}").shuffle(places)
    seen = {ast.unparse(tree)}
    for number, k in places:
        mutant = copy.deepcopy(tree)
        node = _body(mutant, entry_point)[number]
        setattr(node, *[*changes_of(node)][k])
        text = ast.unparse(ast.fix_missing_locations(mutant))
        if text not in seen:
            seen.add(text)
            yield text


def _body(tree: ast.Module, entry_point: str) -> list[ast.AST]:
    """Returns the nodes in the body of a function, in a fixed order."""
    function = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry_point][-1]
    return [node for statement in function.body for node in ast.walk(statement)]

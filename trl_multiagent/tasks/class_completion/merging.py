"""Reads the methods in agents' answers, and puts them into the class. Answers are parsed here, never run."""

import ast
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from trl_multiagent.code.dependencies import IMPORTS, PARSE_ERRORS
from trl_multiagent.code.extraction import parse_completion


MAX_DEPTH = 100  # levels of a function's syntax tree. `ast.unparse` and the compiler recurse into it
DECORATORS = ("staticmethod", "classmethod", "property")  # that a helper method may have
# Typographic quotes and spaces, which some skeletons have in place of Python's
STRAIGHT = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " ", "\u200b": None, "\ufeff": None}
)


@dataclass
class Answer:
    """The code in one agent's answer."""

    methods: dict[str, ast.FunctionDef] = field(default_factory=dict)  # all functions, of each name the last
    outside: set[str] = field(default_factory=set)  # names of those that are plain functions of the module
    imports: list[ast.stmt] = field(default_factory=list)


def find_class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    """Returns the class of a module with this name."""
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def functions_of(node: ast.Module | ast.ClassDef) -> list[ast.FunctionDef]:
    """Returns the functions that stand directly in a module or a class."""
    return [child for child in node.body if isinstance(child, ast.FunctionDef)]


def read_methods(source: str, class_name: str, where: str) -> dict[str, ast.FunctionDef]:
    """
    Returns the methods of a class in the dataset. Raises `ValueError` if there is no such class; the message begins
    with `where`.
    """
    try:
        owner = find_class(ast.parse(source), class_name)
    except PARSE_ERRORS as error:
        raise ValueError(f"{where}: `skeleton` or `solution_code` is not Python source: {error}.") from None
    if owner is None:
        raise ValueError(f"{where}: `skeleton` or `solution_code` has no class `{class_name}`.")
    return {node.name: node for node in functions_of(owner)}


def clean_skeleton(row: dict) -> str:
    """
    Returns the text of a row's skeleton, with straight quotes. If it is still not Python, it is made of the reference
    without the bodies of the methods to write.
    """
    text = row["skeleton"].translate(STRAIGHT)
    with contextlib.suppress(ValueError):
        read_methods(text, row["class_name"], "")
        return text
    tree = ast.parse(row["solution_code"])
    texts = {method["method_name"]: method.get("method_description") or "" for method in row["methods_info"]}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in texts:
            description = texts[node.name].partition('"""')[2].rpartition('"""')[0].strip()
            node.body = [ast.Expr(ast.Constant(description))]
    return ast.unparse(ast.fix_missing_locations(tree))


def read_answer(completion: str, class_name: str) -> Answer:
    """Reads an agent's answer: functions, or a class of that name with methods, in prose and fences or without."""
    tree, answer = parse_completion(completion), Answer()
    owner = find_class(tree, class_name)
    for node in [*functions_of(tree), *(functions_of(owner) if owner else ())]:
        if not _can_be_written(node):
            continue
        answer.methods[node.name] = node
        first = next((argument.arg for argument in node.args.posonlyargs + node.args.args), "")
        if node in tree.body and first not in ("self", "cls") and not node.decorator_list:
            answer.outside.add(node.name)
    imports = [node for node in tree.body if isinstance(node, IMPORTS)]
    answer.imports += [node for node in imports if not ast.unparse(node).startswith("from __future__ ")]
    return answer


def _can_be_written(node: ast.AST) -> bool:
    """
    Returns whether a syntax tree is text that Python reads again. One with too many levels is not, or with a
    hexadecimal number of more than 4,300 decimal digits.
    """
    level: list[ast.AST] = [node]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in ast.iter_child_nodes(parent)]
    with contextlib.suppress(*PARSE_ERRORS):
        ast.unparse(node)
        return not level
    return False


def merge(item: dict, answers: Sequence[Answer], division: Sequence[Sequence[str]]) -> str:
    """
    Puts the agents' methods into the skeleton of an item, and returns the module. The `division` has the names of each
    agent's methods.

    A method counts only in the answer of the agent that it belongs to, and keeps the decorators of the skeleton. Other
    functions of an answer become helper methods, or functions beside the class, unless their name is taken or special
    (`__getattr__` would answer for the methods of others). Imports come first.
    """
    tree = ast.parse(item["skeleton"])
    owner = find_class(tree, item["class_name"])
    assert owner is not None  # the dataset has no other skeletons
    taken = {node.name for node in functions_of(owner)} | {item["class_name"]}
    taken |= {x.asname or x.name for node in tree.body if isinstance(node, IMPORTS) for x in node.names}
    imports, beside = [*ast.parse(item["imports"]).body], []
    written: dict[str, ast.FunctionDef] = {}
    for answer, names in zip(answers, division, strict=True):
        imports += answer.imports
        written |= {name: answer.methods[name] for name in names if name in answer.methods}
        for name, node in answer.methods.items():
            if name in taken or name.startswith("__"):
                continue
            taken.add(name)
            if name in answer.outside:
                beside.append(node)
            else:
                node.decorator_list = [part for part in node.decorator_list if ast.unparse(part) in DECORATORS]
                owner.body.append(node)
    for stub in functions_of(owner):
        if method := written.get(stub.name):
            method.decorator_list = stub.decorator_list
            owner.body[owner.body.index(stub)] = method
    tree.body[:0] = [*{ast.unparse(node): node for node in imports}.values(), *beside]
    return ast.unparse(ast.fix_missing_locations(tree))

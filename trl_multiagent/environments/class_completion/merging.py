"""Reads the methods in agents' answers, and puts them into the class. Answers are parsed here, never run."""

import ast
import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from trl_multiagent.environments.python_code.extraction import parse_completion
from trl_multiagent.environments.python_code.names import IMPORTS, PARSE_ERRORS


MAX_DEPTH = 100  # levels of a function's syntax tree. `ast.unparse` and the compiler recurse into it
DECORATORS = ("staticmethod", "classmethod", "property")  # that a helper method may have
# Typographic quotes and spaces, which some skeletons have in place of Python's
STRAIGHT = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " ", "\u200b": None, "\ufeff": None}
)


@dataclass
class Answer:
    """
    The code in one agent's answer.

    Args:
        methods (`dict[str, ast.FunctionDef]`): Every function, by its name; of several with one name, the last.
        outside (`set[str]`): Names of those that are plain functions of the module, not methods.
        imports (`list[ast.stmt]`): The imports.
    """

    methods: dict[str, ast.FunctionDef] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)
    imports: list[ast.stmt] = field(default_factory=list)


def find_class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    """Returns the class of a module with this name."""
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def functions_of(node: ast.Module | ast.ClassDef) -> list[ast.FunctionDef]:
    """Returns the functions that stand directly in a module or a class."""
    return [child for child in node.body if isinstance(child, ast.FunctionDef)]


def parse_trusted(source: str, class_name: str, where: str) -> ast.ClassDef:
    """
    Returns the class in a text of the dataset.

    Raises:
        ValueError: there is none; the message begins with `where`.
    """
    try:
        owner = find_class(ast.parse(source), class_name)
    except PARSE_ERRORS as error:
        raise ValueError(f"{where}: `skeleton` or `solution_code` is not Python source: {error}.") from None
    if owner is None:
        raise ValueError(f"{where}: `skeleton` or `solution_code` has no class `{class_name}`.")
    return owner


def clean_skeleton(row: dict) -> str:
    """
    Returns the text of a row's skeleton, with straight quotes. If it is still not Python, it is made of the reference without the bodies of
    the methods to write.
    """
    text = row["skeleton"].translate(STRAIGHT)
    with contextlib.suppress(ValueError):
        parse_trusted(text, row["class_name"], "")
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
    places: list[ast.Module | ast.ClassDef] = [tree, *([owner] if owner else [])]
    for place in places:
        for node in functions_of(place):
            if _depth(node) > MAX_DEPTH or not _can_be_written(node):
                continue
            answer.methods[node.name] = node
            first = next((argument.arg for argument in node.args.posonlyargs + node.args.args), "")
            if place is tree and first not in ("self", "cls") and not node.decorator_list:
                answer.outside.add(node.name)
    answer.imports = [node for node in tree.body if isinstance(node, IMPORTS) and not _is_future(node)]
    return answer


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _depth(node: ast.AST) -> int:
    """Returns the number of levels of a syntax tree, without recursion."""
    depth, level = 0, [node]
    while level and depth <= MAX_DEPTH:
        depth, level = depth + 1, [child for parent in level for child in ast.iter_child_nodes(parent)]
    return depth


def _can_be_written(node: ast.AST) -> bool:
    """Returns whether a syntax tree has a text. One with a hexadecimal number of more than 4,300 decimal digits has none."""
    try:
        ast.unparse(node)
    except PARSE_ERRORS:
        return False
    return True


def merge(item: dict, answers: Sequence[Answer], division: Sequence[Sequence[str]]) -> str:
    """
    Puts the agents' methods into the skeleton.

    A method counts only in the answer of the agent that it belongs to, and keeps the decorators of the skeleton. Other functions of an answer
    become helper methods, or functions beside the class, unless their name is taken or special (`__getattr__` would answer for the methods
    of others). Imports come first.

    Args:
        item (`dict`): A row of [`load_class_dataset`].
        answers (`Sequence[Answer]`): The agents' answers.
        division (`Sequence[Sequence[str]]`): The names of the methods that belong to each agent.

    Returns:
        `str`: The module.
    """
    tree = copy.deepcopy(_parsed(item["skeleton"]))
    owner = find_class(tree, item["class_name"])
    assert owner is not None  # the dataset has no other skeletons
    taken = {node.name for node in functions_of(owner)} | {item["class_name"]} | _imported(tree)
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


@lru_cache(maxsize=1024)
def _parsed(skeleton: str) -> ast.Module:
    return ast.parse(skeleton)


def _imported(tree: ast.Module) -> set[str]:
    return {alias.asname or alias.name for node in tree.body if isinstance(node, IMPORTS) for alias in node.names}


def missing(answers: Sequence[Answer], division: Sequence[Sequence[str]]) -> list[str]:
    """Returns the methods that their own agents did not write."""
    return [
        name for answer, names in zip(answers, division, strict=True) for name in names if name not in answer.methods
    ]


def overlap(answers: Sequence[Answer], methods: Sequence[str]) -> float:
    """Returns the share of methods that more than one agent wrote."""
    return sum(sum(name in answer.methods for answer in answers) > 1 for name in methods) / len(methods)


def facts(item: dict, reference: str) -> dict[str, list]:
    """
    Returns what the division of methods depends on, each in the order of `item["methods"]`: `uses`, the methods that the reference calls in
    each; `weights`, its statements; `parameters`, its number of parameters in the skeleton, with `self`.
    """
    methods = item["methods"]
    solution = find_class(ast.parse(reference), item["class_name"])
    skeleton = find_class(_parsed(item["skeleton"]), item["class_name"])
    assert solution is not None and skeleton is not None
    nodes = {node.name: node for node in functions_of(solution)}
    arguments = {node.name: node.args for node in functions_of(skeleton)}
    return {
        "uses": [
            sorted(
                {part.attr for part in ast.walk(nodes[name]) if isinstance(part, ast.Attribute)} & {*methods} - {name}
            )
            for name in methods
        ],
        "weights": [sum(isinstance(part, ast.stmt) for part in ast.walk(nodes[name])) for name in methods],
        "parameters": [
            len(a.posonlyargs + a.args + a.kwonlyargs) + bool(a.vararg) + bool(a.kwarg)
            for a in (arguments[name] for name in methods)
        ],
    }

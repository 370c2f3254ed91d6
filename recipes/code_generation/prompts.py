"""
Prompts for small code models, which copy what a prompt shows and complete any header that they see.

So the problem is told in prose, its header is named once, and problems that others have solved come before it as
earlier messages of the chat. All helpers there take one thing, so that both agents know how `aux` is called without
reading each other's code.

    prompt_files:
      aux: trl_multiagent.configs.recipes.code_generation.prompts:aux
      main: trl_multiagent.configs.recipes.code_generation.prompts:main  # of an agent that works alone: `alone`

`list_aux`, `list_main`, `list_alone` and `list_plain` are for the small problems of the demo, of which each takes a
list or a text apart. Their helper returns a list.
"""

import ast
import inspect


# Of each problem: its call, the task, and the code of aux and of main
SOLVED = (
    (
        "keep_perfect(numbers)",
        "Return the perfect numbers of a list, which equal the sum of their proper divisors.",
        "def aux(x):\n    return x > 1 and sum(d for d in range(1, x) if x % d == 0) == x",
        "def keep_perfect(numbers):\n    return [x for x in numbers if aux(x)]",
    ),
    (
        "days_of_year(year)",
        "Return the number of days of a year.",
        "def aux(x):\n    return x % 400 == 0 or (x % 4 == 0 and x % 100 != 0)",
        "def days_of_year(year):\n    if aux(year):\n        return 366\n    return 365",
    ),
)
LISTS = (
    (
        "total_tenfold_big(xs)",
        "Keep the numbers above 20, multiply each by 10, return the total of them.",
        "def aux(xs):\n    return [x for x in xs if x > 20]",
        "def total_tenfold_big(xs):\n    return sum(x * 10 for x in aux(xs))",
    ),
    (
        "middle_half_fours(xs)",
        "Find the middle one of the halves of the multiples of 4 in xs.",
        "def aux(xs):\n    return [x for x in xs if x % 4 == 0]",
        "def middle_half_fours(xs):\n    ys = [y // 2 for y in aux(xs)]\n    return ys[len(ys) // 2]",
    ),
)
PLAIN = (
    (*LISTS[0][:2], "def total_tenfold_big(xs):\n    return sum(x * 10 for x in xs if x > 20)"),
    (
        *LISTS[1][:2],
        "def middle_half_fours(xs):\n    ys = [x // 2 for x in xs if x % 4 == 0]\n    return ys[len(ys) // 2]",
    ),
)
HELPER = "x is one element of the list, or else the argument. Code only."
ALONE = "Write `{call}`. Code only."


def aux(item):
    """Returns the first messages of the agent that writes the helper."""
    return chat(SOLVED, *told(item), f"Write the helper `aux(x)` of `{{call}}`: {HELPER}", helper)


def main(item):
    """Returns the first messages of the agent that writes the requested function."""
    request = f"Write `{{call}}` with calls of `aux(x)`, which your partner writes: {HELPER}"
    return chat(SOLVED, *told(item), request, requested)


def alone(item):
    """Returns the first messages of an agent that writes all by itself."""
    return chat(SOLVED, *told(item), ALONE, both)


def list_aux(item):
    """Returns the first messages of the agent that writes a helper for a small problem."""
    request = "Write a helper `aux` for `{call}` that returns a list. Code only."
    return chat(LISTS, *told_in_short(item), request, helper)


def list_main(item):
    """Returns the first messages of the agent that writes the function of a small problem."""
    request = "Write `{call}` with calls of `aux`, a helper of your partner that returns a list. Code only."
    return chat(LISTS, *told_in_short(item), request, requested)


def list_alone(item):
    """Returns the first messages of an agent that solves a small problem by itself."""
    return chat(LISTS, *told_in_short(item), ALONE, both)


def list_plain(item):
    """Returns the same with solved problems of one function each."""
    return chat(PLAIN, *told_in_short(item), ALONE, str)


def helper(aux, main):
    return aux


def requested(aux, main):
    return main


def both(aux, main):
    return f"{aux}\n\n\n{main}"


def chat(solved, call, task, request, answer):
    """Returns the solved problems and an item as messages."""
    messages = []
    for solved_call, solved_task, *codes in solved:
        messages += [question(solved_call, solved_task, request), {"role": "assistant", "content": answer(*codes)}]
    return [*messages, question(call, task, request)]


def question(call, task, request):
    return {"role": "user", "content": f"{task}\n{request.format(call=call)}"}


def told(item):
    """
    Returns the call of an item's function, and its task in prose, after other functions that its prompt defines. What
    is no such problem, as feedback in its place, stays as it is.
    """
    try:
        functions = [x for x in ast.parse(item["prompt"]).body if isinstance(x, ast.FunctionDef)]
        (function,) = [x for x in functions if x.name == item["entry_point"]][-1:]
    except (SyntaxError, ValueError):
        return item["entry_point"], item["prompt"]
    values = [x.value for x in function.body if isinstance(x, ast.Expr)]  # the text may follow an import
    texts = [x.value for x in values if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    lines = [line.strip() for line in inspect.cleandoc(texts[0]).split("\n")] if texts else [item["prompt"]]
    others = [ast.unparse(x) for x in functions if x.name != function.name]
    return f"{function.name}({ast.unparse(function.args)})", "\n\n".join([*others, "\n".join(lines)])


def told_in_short(item):
    """Returns the same without examples."""
    call, task = told(item)
    return call, task.partition("\n")[0]

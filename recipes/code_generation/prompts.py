"""
Prompts for small code models, which copy what a prompt shows and complete any header that they see.

So the problem is told in prose, its header is named once, and problems that others have solved come before it as
earlier messages of the chat. All helpers there take one thing, so that both agents know how `aux` is called without
reading each other's code.

    prompt_files:
      aux: trl_multiagent.configs.recipes.code_generation.prompts:aux
      main: trl_multiagent.configs.recipes.code_generation.prompts:main  # of an agent that works alone: `alone`
"""

import ast


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
HELPER = "x is one element of the list, or else the argument. Code only."


def aux(item):
    """Returns the first messages of the agent that writes the helper."""
    return chat(item, f"Write the helper `aux(x)` of `{{call}}`: {HELPER}", lambda aux, main: aux)


def main(item):
    """Returns the first messages of the agent that writes the requested function."""
    request = f"Write `{{call}}` with calls of `aux(x)`, which your partner writes: {HELPER}"
    return chat(item, request, lambda aux, main: main)


def alone(item):
    """Returns the first messages of an agent that writes all by itself."""
    return chat(item, "Write `{call}`. Code only.", lambda aux, main: f"{aux}\n\n\n{main}")


def chat(item, request, answer):
    """Returns the solved problems and the item as messages."""
    messages = []
    for call, task, *codes in SOLVED:
        messages += [question(call, task, request), {"role": "assistant", "content": answer(*codes)}]
    return [*messages, question(*told(item), request)]


def question(call, task, request):
    return {"role": "user", "content": f"Task: {task}\n{request.format(call=call)}"}


def told(item):
    """Returns the call of an item's function, and its task in prose; feedback in its place stays as it is."""
    try:
        tree = ast.parse(item["prompt"])
    except SyntaxError:
        return item["entry_point"], item["prompt"]
    (function,) = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == item["entry_point"]][-1:]
    task = "\n".join(line.strip() for line in (ast.get_docstring(function) or "").split("\n"))
    return f"{function.name}({ast.unparse(function.args)})", task

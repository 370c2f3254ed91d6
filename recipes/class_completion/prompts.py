"""
Prompts for small code models, which copy a skeleton that they see and do not come to their own methods.

So a class is told: its constructor is code, the methods of partners are a line each, and those to write come last, in
prose. Two classes of which others have written their methods come before it, as earlier messages of the chat.

    prompt_files:
      methods: trl_multiagent.configs.recipes.class_completion.prompts:methods
"""

import ast


# Of each class: its name and skeleton, the methods to write, and the answer
SOLVED = (
    (
        "Basket",
        '''
class Basket:
    """Holds fruits and how many there are of each."""

    def __init__(self):
        self.fruits = {}

    def add(self, name, number=1):
        """
        Adds fruits to the basket.
        :param name: str, the kind of fruit
        :param number: int, how many are added
        >>> basket = Basket()
        >>> basket.add("plum", 2)
        >>> basket.fruits
        {'plum': 2}
        """

    def total(self):
        """Returns the number of all fruits."""

    def kinds(self):
        """
        Returns the kinds of fruit in alphabetical order.
        :return: list of str
        """
''',
        ("add", "kinds"),
        """\
def add(self, name, number=1):
    self.fruits[name] = self.fruits.get(name, 0) + number

def kinds(self):
    return sorted(self.fruits)""",
    ),
    (
        "Thermometer",
        '''
class Thermometer:
    """Keeps temperatures in degrees Celsius."""

    def __init__(self, values):
        self.values = values

    @staticmethod
    def to_fahrenheit(value):
        """Converts degrees Celsius to degrees Fahrenheit."""

    def warmest(self):
        """
        Finds the highest temperature in degrees Fahrenheit.
        :return: float, or None if there is no temperature
        """
''',
        ("warmest",),
        """\
def warmest(self):
    if not self.values:
        return None
    return self.to_fahrenheit(max(self.values))""",
    ),
)


def methods(item, own, num_agents):
    """Returns the first messages of an agent that writes some methods of a class."""
    messages = []
    for name, skeleton, solved, answer in SOLVED:
        messages += [question(name, skeleton, solved), {"role": "assistant", "content": answer}]
    return [*messages, question(item["class_name"], f"{item['imports']}\n{item['skeleton']}", own)]


def question(class_name, skeleton, own):
    """Returns a class, and the methods of it that are to be written, in prose."""
    tree = ast.parse(skeleton)
    (owner,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    about, code, others, asked = ast.get_docstring(owner) or "", [], [], []
    for node in owner.body:
        if is_text(node):
            continue
        if not isinstance(node, ast.FunctionDef):
            code.append(node)
            continue
        text = ast.get_docstring(node) or ""
        static = any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)
        call = f"- {'static ' if static else ''}{node.name}({ast.unparse(node.args)})"
        node.body = [part for part in node.body if not is_text(part)]
        if node.name in own:
            asked.append(f"{call}: {text}")
        elif node.body:
            code.append(node)
        else:
            others.append(f"{call}: {text.partition(chr(10))[0]}")
    owner.body = code or [ast.Pass()]
    parts = [about, ast.unparse(tree)]
    if others:
        parts.append("\n".join(["Methods that are already there:", *others]))
    if own:
        parts.append("\n".join(["Methods to write:", *asked]))
        parts.append(f"Write only {' and '.join(own)}. Code only.")
    else:
        parts.append("There is nothing to write. Answer with a single line: pass")
    return {"role": "user", "content": "\n\n".join(parts)}


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)

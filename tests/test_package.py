import ast
import dataclasses
import io
import itertools
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest
import yaml
from transformers import HfArgumentParser
from trl import TrlParser

import trl_multiagent
from trl_multiagent.folders import MODEL_FILES
from trl_multiagent.limits import unsupported_by


ROOT = Path(__file__).resolve().parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_every_name_can_be_had():
    classes = [name for name in trl_multiagent.__all__ if name not in ("JointAction", "Prompt")]
    assert [getattr(trl_multiagent, name).__name__ for name in classes] == classes
    assert trl_multiagent.JointAction == dict[str, str]
    assert set(trl_multiagent.__all__) <= set(dir(trl_multiagent))
    with pytest.raises(AttributeError, match="'trl_multiagent' has no attribute 'PPOTrainer'"):
        _ = trl_multiagent.PPOTrainer


@pytest.mark.parametrize("name", [name for name in trl_multiagent.__all__ if name.endswith("Config")])
def test_trl_and_transformers_parse_every_configuration(name):
    """Their parsers give every argument, the unsupported ones with their defaults."""
    config_class = getattr(trl_multiagent, name)
    by_hand = config_class(output_dir="x")
    (by_trl,) = TrlParser((config_class,)).parse_args_and_config(["--output_dir", "x"])
    (by_transformers,) = HfArgumentParser(config_class).parse_args_into_dataclasses(["--output_dir", "x"])
    for parsed in (by_trl, by_transformers):
        assert {field.name: getattr(parsed, field.name) for field in dataclasses.fields(parsed)} == {
            field.name: getattr(by_hand, field.name) for field in dataclasses.fields(by_hand)
        }
    with pytest.raises(ValueError, match="`label_names` is"):
        HfArgumentParser(config_class).parse_args_into_dataclasses(["--output_dir", "x", "--label_names", "y"])
    names = {*unsupported_by(config_class)} & {field.name for field in dataclasses.fields(config_class)}
    config_class(output_dir="x", **dict.fromkeys(names))  # `null` asks for nothing


@pytest.mark.parametrize("module", ["code.sandbox", "cli", "environments", "new_task", "folders", "rewards"])
def test_what_needs_no_torch_does_not_load_it(module):
    code = f"import sys, trl_multiagent.{module}; print(sys.modules.keys() & {{'torch', 'numpy', 'datasets'}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


MOST_TOKENS = 70_000  # of the core
MOST_FILES = 26  # that a step enters


# Prints the modules of the package that a statement imports, although this process has imported all of it
IMPORTED = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "trl_multiagent"]:
    del sys.modules[name]
exec(sys.argv[1], {})
print(*[x.__file__ for name, x in sys.modules.items() if name.startswith("trl_multiagent")])
"""


def test_the_core_can_be_read_in_a_day(forked, tmp_path):
    page = (ROOT / "docs" / "architecture.md").read_text()
    statement, modules = re.search(r"```python\n(.*?)\n```.*?```text\n(.*?)```", page, re.DOTALL).groups()
    named = {f"{folder}{name}.py" for folder, *names in map(str.split, modules.splitlines()) for name in names}
    (tmp_path / "imported.py").write_text(IMPORTED)
    done = forked.run(tmp_path / "imported.py", statement)
    assert done.codes == [0], done.stderr
    package = ROOT / "trl_multiagent"
    files = {str(Path(file).relative_to(package)) for file in done.stdout.split() if not file.endswith("__init__.py")}
    assert files == {name.removeprefix("./") for name in named}
    assert sum(code_tokens((package / name).read_text()) for name in files) <= MOST_TOKENS


def code_tokens(text: str) -> int:
    """Counts the tokens of a module without comments, docstrings, line breaks and indents."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    skipped += (tokenize.ENCODING, tokenize.ENDMARKER)
    documented = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)
    ]
    lines = {k for node in documented for k in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in skipped and token.start[0] not in lines for token in tokens)


def test_the_page_counts_the_files_of_a_step_and_of_an_evaluation(forked):
    done = forked.run(ROOT / "scripts" / "ways.py")
    assert done.codes == [0], done.stderr
    step, evaluation = re.findall(r"^(?:One optimizer step|An evaluation): (\d+) files$", done.stdout, re.MULTILINE)
    assert f": {step} in a step, {evaluation} in an evaluation." in (ROOT / "docs" / "architecture.md").read_text()
    assert int(step) <= MOST_FILES


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_a_page_names_files_that_exist(page):
    for name in re.findall(r"`([\w.<>*/-]+(?:/|\.(?:cff|ipynb|md|py|toml|yaml)))`", (ROOT / page).read_text()):
        pattern = re.sub("<[a-z]+>", "*", name)
        found = itertools.chain(ROOT.glob(pattern), (ROOT / "trl_multiagent").rglob(pattern))
        assert next(found, None) is not None, name


def test_an_argument_begins_a_line_of_its_docstring():
    for path in [*(ROOT / "trl_multiagent").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            is_list = False
            for line in (text or "").splitlines():
                is_list = line in ("Args:", "Attributes:", "Raises:") or (is_list and line[:1] in ("", " "))
                if is_list and re.match(r"    \S", line):  # what an entry says further is indented
                    assert re.match(r"    ([\w`*[\]~./, ]+( \(.*)?:|\*?\w+ \()", line), f"{path}: {line}"
                names = re.match(r" *\*?(?:\w+(?: \([^()]+\))?, )*\w+ \(", line)  # `a, b (type): ...` is an entry
                rest = line[names.end() if names else 0 :]
                assert not re.search(r"\w \(\[?`[^()]+\): ", rest), f"{path}: {line}"


def test_no_test_is_skipped_everywhere():
    reasons = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
            if name in ("skip", "importorskip"):
                reason = node.args[0]
            elif name == "skipif":
                (reason,) = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            else:
                continue
            reasons.add((reason.values[0] if isinstance(reason, ast.JoinedStr) else reason).value)
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## What is skipped")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", text, flags=re.MULTILINE)
    listed = {one or other for row, _ in rows for one, other in re.findall(r"``(.+?)``(?!`)|`([^`]+)`", row)}
    assert reasons == listed
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    assert all(job.startswith("none: ") or job.split("`")[1] in jobs for _, job in rows)
    extras = re.search(r"-e \"\.\[(.*openenv.*)\]\"", (ROOT / "Makefile").read_text())[1].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    by_hand = {"rounding", "vllm", "tensorboard", "trackio", "wandb"}
    assert {*extras} == project["optional-dependencies"].keys() - by_hand


def test_runs_know_no_task_family():
    for path in (Path(trl_multiagent.__file__).parent / "runs").glob("*.py"):
        imported = re.findall(r"^ *(?:from|import) (trl_multiagent\.\S+)", path.read_text(), flags=re.MULTILINE)
        families = [name for name in imported if re.search(r"^trl_multiagent\.(configs|tasks|code)\b", name)]
        assert families == [], path.name


def test_the_names_of_model_files_have_one_home():
    package = Path(trl_multiagent.__file__).parent
    quoted = re.compile("|".join(f'"{re.escape(name)}"' for name in MODEL_FILES))
    assert [path.name for path in package.rglob("*.py") if quoted.search(path.read_text())] == ["folders.py"]


def test_every_part_imports_only_parts_of_lower_layers():
    text = (ROOT / "docs" / "architecture.md").read_text()
    lines = text.split("```text\n")[2].split("```")[0].splitlines()
    layer = {part: number for number, line in enumerate(lines) for part in line.split()}
    for path in (ROOT / "trl_multiagent").rglob("*.py"):
        one = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            is_own = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl_multiagent.")
            if is_own and one != "__init__":  # which names the public classes of all parts
                other = room(node.module)
                assert one == other or layer[one] < layer[other], f"{path} imports {node.module}"
    assert all(f"`{part}" in text or f"/{part}/`" in text for part in layer)


def test_modules_import_each_other_in_no_circle():
    """Imports for type checkers and imports within functions count too."""
    trees = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in (ROOT / "trl_multiagent").rglob("*.py")
    }
    imports: dict[str, set[str]] = {}
    for name, tree in trees.items():
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        named = {(node.module, f"{node.module}.{alias.name}") for node in nodes for alias in node.names}
        imports[name] = {whole if whole in trees else module for module, whole in named} & trees.keys()
    imports["trl_multiagent"] = set()  # names the public classes of all parts
    while leaves := {name for name, others in imports.items() if not others & imports.keys()}:
        imports = {name: others for name, others in imports.items() if name not in leaves}
    assert not imports, "these modules are in a circle, or import one that is"


def test_teams_are_loaded_in_one_place():
    calls = [
        f"{path.parent.name}/{path.name}"
        for path in (ROOT / "trl_multiagent").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("AgentTeam.from_pretrained")
    ]
    assert set(calls) == {"team/load.py"}


def room(module: str) -> str:
    """The room of a module, as docs/architecture.md names it."""
    parts = module.split(".")[1:]
    if parts[:2] in (["trainers", "base"], ["code", "sandbox"], ["environments", "task_errors"]):
        return "/".join(parts[:2])
    if parts[0] == "tasks" and (ROOT / "trl_multiagent" / "tasks" / "".join(parts[1:2])).is_dir():
        return "".join(parts[1:2]) or parts[0]  # a task family, or what families share
    return parts[0]

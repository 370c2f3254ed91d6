import ast
import dataclasses
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import HfArgumentParser
from trl import TrlParser

import trl_multiagent
from trl_multiagent.file_names import MODEL_FILES


ROOT = Path(__file__).resolve().parents[1]


def test_every_name_can_be_had():
    classes = [name for name in trl_multiagent.__all__ if name not in ("JointAction", "Prompt")]
    assert [getattr(trl_multiagent, name).__name__ for name in classes] == classes
    assert trl_multiagent.JointAction == dict[str, str]
    assert set(trl_multiagent.__all__) <= set(dir(trl_multiagent))
    with pytest.raises(AttributeError, match="'trl_multiagent' has no attribute 'PPOTrainer'"):
        _ = trl_multiagent.PPOTrainer


@pytest.mark.parametrize("name", [name for name in trl_multiagent.__all__ if name.endswith("Config")])
def test_trl_and_transformers_parse_every_configuration(name):
    """Their parsers give every argument, the refused ones with their defaults."""
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


@pytest.mark.parametrize("module", ["sandbox", "cli", "environments", "new_task", "file_names", "rewards"])
def test_what_needs_no_torch_does_not_load_it(module):
    code = f"import sys, trl_multiagent.{module}; print(sys.modules.keys() & {{'torch', 'numpy', 'datasets'}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_recipes_know_no_task_family():
    for path in (Path(trl_multiagent.__file__).parent / "recipe").glob("*.py"):
        imported = re.findall(r"^ *(?:from|import) (trl_multiagent\.\S+)", path.read_text(), flags=re.MULTILINE)
        families = [name for name in imported if re.search(r"\.(demo|sandbox|code_generation|python_code)\b", name)]
        assert families == [], path.name


def test_the_names_of_model_files_have_one_home():
    package = Path(trl_multiagent.__file__).parent
    quoted = re.compile("|".join(f'"{re.escape(name)}"' for name in MODEL_FILES))
    assert [path.name for path in package.rglob("*.py") if quoted.search(path.read_text())] == ["file_names.py"]


def test_the_architecture_page_has_all_imports_between_rooms_and_no_circle():
    text = (ROOT / "docs" / "architecture.md").read_text()
    drawn = set(re.findall(r"^ +([\w/]+) --> ([\w/]+)$", text, re.MULTILINE))
    found = set()
    for path in (ROOT / "trl_multiagent").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl_multiagent."):
                found.add((room(".".join(path.relative_to(ROOT).with_suffix("").parts)), room(node.module)))
    # The package's own `__init__` names the public classes of all rooms
    assert {(one, other) for one, other in found if one not in (other, "__init__")} == drawn
    below = {one: {other for first, other in drawn if first == one} for one, _ in drawn}
    list(graphlib.TopologicalSorter(below).static_order())  # a circle is an error
    assert all(f"| `{name}" in text or f"/{name}" in text for pair in drawn for name in pair)


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
    if parts[:2] == ["trainers", "base"]:
        return "trainers/base"
    if parts[0] == "environments" and (ROOT / "trl_multiagent" / "environments" / "".join(parts[1:2])).is_dir():
        return "".join(parts[1:2]) or parts[0]  # a task family, or what families share
    return parts[0]

import re
import subprocess
import sys
from pathlib import Path

import pytest

import trl_multiagent


def test_every_name_can_be_had():
    classes = [name for name in trl_multiagent.__all__ if name not in ("JointAction", "Prompt")]
    assert [getattr(trl_multiagent, name).__name__ for name in classes] == classes
    assert trl_multiagent.JointAction == dict[str, str]
    assert set(trl_multiagent.__all__) <= set(dir(trl_multiagent))
    with pytest.raises(AttributeError, match="'trl_multiagent' has no attribute 'PPOTrainer'"):
        _ = trl_multiagent.PPOTrainer


@pytest.mark.parametrize("module", ["sandbox", "cli", "environments"])
def test_what_needs_no_torch_does_not_load_it(module):
    code = f"import sys, trl_multiagent.{module}; print(sys.modules.keys() & {{'torch', 'numpy', 'datasets'}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_recipes_know_no_task_family():
    for path in (Path(trl_multiagent.__file__).parent / "recipe").glob("*.py"):
        imported = re.findall(r"^ *(?:from|import) (trl_multiagent\.\S+)", path.read_text(), flags=re.MULTILINE)
        families = [name for name in imported if re.search(r"\.(demo|sandbox|code_generation|python_code)\b", name)]
        assert families == [], path.name

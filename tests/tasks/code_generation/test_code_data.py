import json

import pyarrow
import pyarrow.parquet
import pytest

from trl_multiagent.console import tell
from trl_multiagent.tasks.code_generation import load_code_dataset
from trl_multiagent.tasks.code_generation.item_facts import read_problem


def row(number, **changes):
    return {
        "task_id": f"Toy/{number}",
        "prompt": f'def add_{number}(x):\n    """Adds {number}."""\n',
        "entry_point": f"add_{number}",
        "test": f"def check(candidate):\n    assert candidate(1) == {number + 1}\n",
        **changes,
    }


def mbpp_row(number, **changes):
    row = {"source_file": "x", "task_id": number, "prompt": "Write a function to add."}
    row |= {"code": "def add(x, y=1):\n  return x + y", "test_imports": []}
    return {**row, "test_list": ["assert add(1) == 2", "assert add(1, 3) == 4"], **changes}


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def solves(item):
    """Runs the item's reference solution, which this file wrote itself or which comes with the benchmark."""
    namespace = {}
    exec(item["prompt"] + item["canonical_solution"], namespace)
    checks = {}
    exec(f"{read_problem(item['prompt'], item['entry_point']).prefix}\n{item['test']}", checks)
    checks["check"](namespace[item["entry_point"]])
    return True


# Reading and slicing


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    path = write(tmp_path / f"humaneval{suffix}", [row(n, extra=n) for n in range(3)])
    dataset = load_code_dataset(path)
    assert dataset.column_names == ["task_id", "prompt", "entry_point", "test"]
    assert dataset.to_list() == [row(n) for n in range(3)]


def test_splits_of_a_file(tmp_path):
    path = write(tmp_path / "humaneval.jsonl", [row(n) for n in range(9)])
    expected = {None: range(9), "test[3:7]": range(3, 7), "[6:]": range(6, 9), "test[:2]+test[5:6]": [0, 1, 5]}
    for split, numbers in expected.items():
        assert load_code_dataset(path, split=split)["task_id"] == [f"Toy/{n}" for n in numbers]
    for split in ("test[", "test[a:b]", "test[:1]+train[:1]"):
        with pytest.raises(ValueError, match=r"does not select rows of .*humaneval.jsonl"):
            load_code_dataset(path, split=split)


def test_the_only_split_of_a_dataset_needs_no_name(tmp_path):
    folder = tmp_path / "humaneval"
    folder.mkdir()
    write(folder / "train.jsonl", [row(n) for n in range(3)])
    assert load_code_dataset(str(folder), split="[2:]")["task_id"] == ["Toy/2"]
    write(folder / "validation.jsonl", [row(5)])
    with pytest.raises(ValueError, match=r"has the splits .*train.*: name one, e.g. \w+\[2:\]"):
        load_code_dataset(str(folder), split="[2:]")


def test_rows_are_read_by_their_columns(tmp_path):
    path = write(tmp_path / "problems.jsonl", [row(1)])
    with pytest.raises(ValueError, match="Unknown dataset type 'apps': expected one of humaneval, coophumaneval"):
        load_code_dataset(path, type="apps")
    mbpp = write(tmp_path / "problems_2.jsonl", [mbpp_row(1)])
    for type in (None, "humaneval", "coophumaneval", "mbpp"):
        assert len(load_code_dataset(path, type=type)) == 1
        assert load_code_dataset(mbpp, type=type)["task_id"] == ["MBPP/1"]


# Malformed input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "field `prompt` is missing"),
        ({"task_id": 7}, "field `task_id` must be text, not an integer"),
        ({"entry_point": "  "}, "field `entry_point` is empty"),
        ({"task_id": "Toy/0"}, "field `task_id` is 'Toy/0', as in row 1"),
        ({"prompt": "def add_1(x:\n"}, "field `prompt` is malformed: it is not Python source"),
        ({"prompt": "def other(x):\n    pass\n"}, "field `prompt` .* does not define the entry point `add_1`"),
        ({"test": "def check(candidate)\n"}, "field `test` is not Python source"),
        ({"test": "def check(candidate):\n    candidate(1)\n    assert True"}, "has no assert that can fail"),
        ({"canonical_solution": None}, "field `canonical_solution` is missing"),
    ],
)
def test_a_malformed_row_names_file_row_and_field(tmp_path, changes, message):
    bad = {key: value for key, value in row(1, **changes).items() if value is not ...}
    good = [row(0), row(2)]
    if "canonical_solution" in changes:
        good = [row(n, canonical_solution="    return 0\n") for n in (0, 2)]
    path = write(tmp_path / "humaneval.jsonl", [good[0], bad, good[1]])
    with pytest.raises(ValueError, match=rf"humaneval\.jsonl, row 2: .*{message}"):
        load_code_dataset(path, split="test[:1]")  # a bad row is reported wherever it is


def test_a_malformed_mbpp_row_names_file_row_and_field(tmp_path):
    for changes, message in (
        ({"code": ...}, "field `code` is missing"),
        ({"test_list": ["add(1) == 2"]}, "field `test_list`, .* is not one assert"),
        ({"test_list": ["assert sub(1) == 2"]}, "field `code` defines no function that every entry"),
    ):
        bad = {key: value for key, value in mbpp_row(2, **changes).items() if value is not ...}
        path = write(tmp_path / "mbpp.jsonl", [mbpp_row(1), bad])
        with pytest.raises(ValueError, match=rf"mbpp\.jsonl, row 2: .*{message}"):
            load_code_dataset(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("humaneval.jsonl", json.dumps(row(1)) + "\n{'task_id'", "humaneval.jsonl, row 2 is not JSON"),
        ("humaneval.jsonl", "[1]\n", "humaneval.jsonl must hold rows, each an object"),
        ("humaneval.json", "{}", "humaneval.json must hold rows"),
    ],
)
def test_a_malformed_file_is_an_error(tmp_path, name, text, message):
    with pytest.raises(FileNotFoundError, match=rf"There is no file {tmp_path}/{name}"):
        load_code_dataset(str(tmp_path / name))
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_code_dataset(str(tmp_path / name))


CHECK = "def check(candidate):\n    "
IMPOSSIBLE_TESTS = {
    "two arguments": ("def check(candidate, other):\n    assert candidate(1) == 2", "takes one argument"),
    "compiler's error": (CHECK + "assert candidate(1) == 2\nreturn 1", "is not Python source: 'return' outside"),
    "candidate unused": (CHECK + "assert 1 + 1 == 2", "never calls the candidate"),
}
USABLE_TESTS = {
    "own name": CHECK + "assert add_1(1) == 2",
    "at module level": "assert candidate(1) == 2\ndef check(candidate):\n    pass",
    "guard": CHECK + "try:\n        candidate(None)\n        assert False\n    except TypeError:\n        pass",
}


def test_tests_that_can_judge_no_answer_are_refused(tmp_path):
    for test, message in IMPOSSIBLE_TESTS.values():
        path = write(tmp_path / "humaneval.jsonl", [row(0), row(1, test=test)])
        with pytest.raises(ValueError, match=rf"humaneval\.jsonl, row 2: field `test` .*{message}"):
            load_code_dataset(path)
    for test in USABLE_TESTS.values():
        assert load_code_dataset(write(tmp_path / "humaneval.jsonl", [row(1, test=test)]))[0]["test"] == test


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"entry_point": "aux", "prompt": "def aux(x):\n    pass\n"}, "entry_point"),
        ({"prompt": "def aux(x):\n    return x\n\ndef add_1(x):\n    pass\n"}, "prompt"),
        ({"prompt": "from math import floor as aux\n\ndef add_1(x):\n    pass\n"}, "prompt"),
    ],
)
def test_the_name_of_the_helper_is_taken_in_a_team(tmp_path, changes, field):
    path = write(tmp_path / "humaneval.jsonl", [row(1, **changes)])
    with pytest.raises(ValueError, match=f"row 1: field `{field}` .*`aux`, which is the name of the helper"):
        load_code_dataset(path)
    assert len(load_code_dataset(path, num_agents=1)) == 1


# Prompts and MBPP's schema


def test_an_mbpp_row_in_humaneval_form(tmp_path):
    changes = {
        "code": "import math as m\nSCALE = 2\ndef half(v):\n  return v / SCALE\nclass Box:\n  value = 1\n"
        'def add(x, y=1, *rest):\n  """Old text."""\n  text = """a\nb"""\n  return half(2 * x) + y + m.floor(0) + '
        "len(text) - 3",
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(add(1), 2)", "assert add(add(1), 3) == 5, 'add'"],
        "prompt": 'Write a function to "add".',
    }
    (item,) = load_code_dataset(write(tmp_path / "mbpp.jsonl", [mbpp_row(5, **changes)])).to_list()
    assert item["task_id"] == "MBPP/5" and item["entry_point"] == "add"
    prompt = 'import math as m\n\n\ndef add(x, y=1, *rest):\n    """ Write a function to "add".\n    """\n'
    assert item["prompt"] == prompt
    assert item["test"] == (
        "import math\n\n\ndef check(candidate):\n    assert math.isclose(candidate(1), 2)\n"
        "    assert candidate(candidate(1), 3) == 5, 'add'\n"
    )
    assert "Old text" not in item["canonical_solution"]
    assert solves(item)


def test_helpers_that_the_signature_needs_are_part_of_the_prompt(tmp_path):
    code = "class Box:\n  value = 4\nSTEP = Box.value\ndef add(x: int, y=STEP):\n  return x + y"
    row = mbpp_row(5, code=code, test_list=["assert add(1) == 5"])
    (item,) = load_code_dataset(write(tmp_path / "mbpp.jsonl", [row])).to_list()
    assert item["prompt"].startswith("class Box:") and "Box" not in item["canonical_solution"]
    assert solves(item)


# The benchmarks themselves


@pytest.mark.parametrize(
    ("name", "split", "ids"),
    [
        ("humaneval", "test[33:163]", ["HumanEval/33", "HumanEval/162", 130]),
        ("openai/openai_humaneval", "test[:32]", ["HumanEval/0", "HumanEval/31", 32]),
        ("OpenMLRL/CoopHumanEval", "[16:]", ["CoopHumanEval/16", "CoopHumanEval/81", 66]),
        ("google-research-datasets/mbpp", "train", ["MBPP/602", "MBPP/809", 120]),
        ("mbpp", None, ["MBPP/11", "MBPP/479", 257]),
        ("OpenMLRL/MBPP", "test[15:65]", ["MBPP/56", "MBPP/113", 50]),
    ],
)
def test_published_slices_are_read_from_the_package_without_a_network(name, split, ids, capsys):
    tell.cache_clear()  # it says so once in a process
    rows = load_code_dataset(name, split)["task_id"]
    assert [rows[0], rows[-1], len(rows)] == ids
    with pytest.raises(ValueError, match=name):
        load_code_dataset(name, "test[1000:]")
    assert ("cannot be reached" in capsys.readouterr().err) == ("/" in name)

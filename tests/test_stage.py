"""`Stage`: the manifest, the lock, what is refused, and that a kill at any time repeats one part at most."""

import errno
import json

import pytest
from accelerate import PartialState

from trl_multiagent.folders import locked, read_json, replacing, write_text
from trl_multiagent.jobs.stage import MANIFEST, Stage


SETTINGS = {"temperature": 1.0, "roles": ["aux", "main"], "weights": "a1", "number of processes": 1}


def stage(folder, name="collection", settings=SETTINGS, **more):
    return Stage(folder, name, settings, PartialState(), **more)


def work(folder, parts=("0", "1", "2"), kill_at=None, **more):
    """Writes the parts that are missing, and returns them."""
    own = stage(folder, **more)
    written = []
    with own.open():
        for part in [part for part in parts if not own.has(part)]:
            written.append(part)
            if part == kill_at:
                (folder / "parts").mkdir()
                (folder / "parts" / f"_{part}_0123_unfinished").write_text("hal")  # written in part
                raise KeyboardInterrupt
            own.save(part, [{"part": part}])
        own.save_result("result.json", {"parts": len(parts)})
    return written


@pytest.mark.parametrize("kill_at", ["0", "1", "2"])
def test_a_kill_repeats_the_part_that_was_not_complete(tmp_path, kill_at):
    folder = tmp_path / "new" / "work"
    with pytest.raises(KeyboardInterrupt):
        work(folder, kill_at=kill_at)
    assert not stage(folder).has("result.json")
    parts = ["0", "1", "2"]
    assert work(folder) == parts[parts.index(kill_at) :] and work(folder) == []
    assert [stage(folder).read(part) for part in parts] == [[{"part": part}] for part in parts]
    assert read_json(folder / "result.json") == {"parts": 3} and not [*folder.rglob("*_unfinished")]
    assert json.loads((folder / MANIFEST).read_text()) == {"stage": "collection", "settings": SETTINGS}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"temperature": 0.7}, r"temperature was 1\.0, is 0\.7\. Choose another folder, or remove this one\."),
        ({"temperature": 0.7, "weights": "b2"}, r"temperature was 1\.0, is 0\.7; weights was a1, is b2\."),
        ({"roles": ["main"]}, r"roles was \['aux', 'main'\], is \['main'\]"),
        ({"top_p": 0.9}, r"top_p was not set, is 0\.9"),
        ({"weights": None}, "weights was a1, is None"),
    ],
)
def test_work_with_other_settings_is_refused_by_one_line(tmp_path, change, problem):
    work(tmp_path)
    before = (tmp_path / MANIFEST).read_text()
    with pytest.raises(ValueError, match=f"^{tmp_path} holds another collection: {problem}") as raised:
        work(tmp_path, settings={**SETTINGS, **change})
    assert "\n" not in str(raised.value) and (tmp_path / MANIFEST).read_text() == before


def test_other_work_is_refused_and_free_settings_are_not_compared(tmp_path):
    work(tmp_path)
    with pytest.raises(ValueError, match="holds another evaluation: stage was collection, is evaluation"):
        work(tmp_path, name="evaluation", advice="choose another `output_dir`")
    two = {**SETTINGS, "number of processes": 2}
    assert work(tmp_path, settings=two, free=["number of processes"]) == []
    with pytest.raises(ValueError, match="number of processes was 2, is 1"):  # what was free is recorded
        work(tmp_path)


def test_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "_my_unfinished").write_text("novel")
    with pytest.raises(ValueError, match="holds other files: choose another folder"):
        work(tmp_path)
    assert not (tmp_path / MANIFEST).exists() and (tmp_path / "mine" / "_my_unfinished").is_file()
    with pytest.raises(ValueError, match=r"settings\.json is a file: choose another folder"):
        work(tmp_path / "settings.json")


def test_work_goes_on_that_was_killed_when_it_wrote_its_first_file(tmp_path):
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*/stage.json'"),
        replacing(tmp_path / MANIFEST) as unfinished,
    ):
        unfinished.write(b"{")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"_{MANIFEST}_0123_unfinished").write_text("{")  # killed
    assert work(tmp_path) == ["0", "1", "2"]


def test_files_are_not_written_through_links(tmp_path, monkeypatch):
    other, path = tmp_path / "other", tmp_path / "report.html"
    other.write_text("mine")
    path.symlink_to(other)
    write_text(path, "new")
    assert path.read_text() == "new" and not path.is_symlink()
    monkeypatch.setattr("secrets.token_hex", lambda n: "0123")  # as if somebody had guessed it
    for link in (tmp_path / "_report.html_0123_unfinished", tmp_path / "_none_0123_unfinished"):
        link.symlink_to(other if "report" in link.name else tmp_path / "new")
        with pytest.raises(FileExistsError, match="_unfinished"):
            write_text(tmp_path / link.name.split("_")[1], "newer")
    assert other.read_text() == "mine" and path.read_text() == "new" and not (tmp_path / "new").exists()


def test_one_program_at_a_time(tmp_path):
    message = f"Another program is writing to {tmp_path}: wait until it ends, or choose another folder"
    with locked(tmp_path, "choose another folder"), pytest.raises(ValueError, match=message):
        work(tmp_path)
    assert not list(tmp_path.iterdir())
    with stage(tmp_path).open(), pytest.raises(ValueError, match=message):
        work(tmp_path)
    assert work(tmp_path) == ["0", "1", "2"]  # the lock has been released


def test_parts_that_are_missing_or_damaged_are_named(tmp_path):
    work(tmp_path)
    with pytest.raises(ValueError, match=r"/3 is missing: several processes need a folder that all of them share"):
        stage(tmp_path).read("3")
    (tmp_path / "1").write_text('{"part"')
    with pytest.raises(ValueError, match="/1 is damaged: "):
        stage(tmp_path).read("1")

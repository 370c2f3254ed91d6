import random
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_multiagent.demo import model as demo


def build_two_steps(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "STEPS", {1: 2})
        demo.build_model(folder, progress=False, num_turns=1)


@pytest.fixture(scope="module")
def small_build(tmp_path_factory) -> Path:
    """A model of two training steps."""
    folder = tmp_path_factory.mktemp("small") / "model"
    build_two_steps(folder)
    return folder


@pytest.fixture
def builds(small_build, tmp_path, monkeypatch) -> list[Path]:
    """An empty cache and a quick builder; the list of its builds."""
    monkeypatch.setenv("TRL_MULTIAGENT_CACHE", str(tmp_path / "cache"))
    built = []

    def build(folder, progress, num_turns):
        built.append(folder)
        shutil.copytree(small_build, folder)

    monkeypatch.setattr(demo, "build_model", build)
    return built


def test_built_once_and_kept(builds, tmp_path):
    path = demo.demo_model(progress=False)
    assert demo.demo_model(progress=False) == path
    assert len(builds) == 1
    assert Path(path).parent == tmp_path / "cache"
    AutoModelForCausalLM.from_pretrained(path)
    assert {entry.name for entry in Path(path).parent.iterdir()} <= {Path(path).name, f"{Path(path).name}.lock"}


def test_an_interrupted_build_leaves_nothing_behind(builds, monkeypatch):
    build = demo.build_model

    def interrupted(folder, progress, num_turns):
        build(folder, progress, num_turns)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "build_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.demo_model(progress=False)
    assert [entry for entry in demo.cache_folder().iterdir() if entry.is_dir()] == []
    monkeypatch.setattr(demo, "build_model", build)
    AutoModelForCausalLM.from_pretrained(demo.demo_model(progress=False))


def test_of_several_callers_one_builds(builds, monkeypatch):
    build = demo.build_model

    def slow(folder, progress, num_turns):
        build(folder, progress, num_turns)
        time.sleep(0.3)

    monkeypatch.setattr(demo, "build_model", slow)
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(demo.demo_model(progress=False))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1 and len(paths) == 4 and len(set(paths)) == 1


def test_fingerprint_covers_code_and_versions(tmp_path, monkeypatch):
    sources = Path(demo.__file__).parent
    fingerprints = {demo.fingerprint()}
    for changed in ("problems.py", "demonstrations.py", "revisions.py", "model.py"):
        folder = tmp_path / changed
        shutil.copytree(sources, folder)
        monkeypatch.setattr(demo, "__file__", str(folder / "model.py"))
        assert demo.fingerprint() in fingerprints
        with open(folder / changed, "a") as file:
            file.write("\n")
        fingerprints.add(demo.fingerprint())
        monkeypatch.undo()
    monkeypatch.setattr(demo, "version", lambda library: "0")
    fingerprints.add(demo.fingerprint())
    assert len(fingerprints) == 6


def test_cache_folder(monkeypatch):
    monkeypatch.delenv("TRL_MULTIAGENT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert demo.cache_folder() == Path("/somewhere/trl_multiagent")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert demo.cache_folder() == Path("/home/someone/.cache/trl_multiagent")
    monkeypatch.setenv("TRL_MULTIAGENT_CACHE", "/elsewhere")
    assert demo.cache_folder() == Path("/elsewhere")


def test_building_is_reproducible_and_leaves_the_caller_alone(small_build, tmp_path):
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()
    build_two_steps(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert torch.get_num_threads() == states[3]
    for path in small_build.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_tokenizer_is_what_generation_needs(small_build):
    tokenizer, model = AutoTokenizer.from_pretrained(small_build), AutoModelForCausalLM.from_pretrained(small_build)
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size <= demo.VOCABULARY
    for text in ("def aux(xs):\n    return [x for x in xs if x > 5]\n", "  Ω\tπ \r\n 🙂 a , b ."):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert list(tokenizer("x")) == ["input_ids", "attention_mask"]

import os
import random
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_multiagent.folders import cache_folder
from trl_multiagent.models import imitation
from trl_multiagent.models.imitation import ImitationModel


def demonstrate(number, rng):
    return [(f"# {rng.randrange(9)}\ndef f(xs):", "\n    return [x for x in xs if x > 5]\n") for _ in range(number)]


SMALL = ImitationModel("small", demonstrate, steps=2, sources=[])


@pytest.fixture(scope="module")
def small_build(tmp_path_factory) -> Path:
    """A model of two training steps."""
    folder = tmp_path_factory.mktemp("small") / "model"
    SMALL.build(folder, progress=False)
    return folder


@pytest.fixture
def builds(small_build, tmp_path, monkeypatch) -> list[Path]:
    """An empty cache and a quick builder; the list of its builds."""
    monkeypatch.setenv("TRL_MULTIAGENT_CACHE", str(tmp_path / "cache"))
    built = []

    def build(self, folder, progress):
        built.append(folder)
        shutil.copytree(small_build, folder)

    monkeypatch.setattr(ImitationModel, "build", build)
    return built


def test_built_once_and_kept(builds, tmp_path):
    path = SMALL.path(progress=False)
    assert SMALL.path(progress=False) == path
    assert len(builds) == 1
    assert Path(path).parent == tmp_path / "cache"
    AutoModelForCausalLM.from_pretrained(path)
    assert {entry.name for entry in Path(path).parent.iterdir()} <= {Path(path).name, f"{Path(path).name}.lock"}


def test_an_interrupted_build_leaves_nothing_behind(builds, monkeypatch):
    build = ImitationModel.build

    def interrupted(self, folder, progress):
        build(self, folder, progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(ImitationModel, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SMALL.path(progress=False)
    assert [entry for entry in cache_folder().iterdir() if entry.is_dir()] == []
    monkeypatch.setattr(ImitationModel, "build", build)
    AutoModelForCausalLM.from_pretrained(SMALL.path(progress=False))


def test_of_several_callers_one_builds(builds, monkeypatch):
    build = ImitationModel.build

    def slow(self, folder, progress):
        build(self, folder, progress)
        time.sleep(0.3)

    monkeypatch.setattr(ImitationModel, "build", slow)
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(SMALL.path(progress=False))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1 and len(paths) == 4 and len(set(paths)) == 1


def test_fingerprint_covers_code_and_versions(tmp_path, monkeypatch):
    (tmp_path / "data").write_text("1")
    model = ImitationModel("small", demonstrate, 2, [tmp_path / "data"])
    longer = ImitationModel("small", demonstrate, 3, model.sources)
    fingerprints = [x.fingerprint() for x in (model, model, longer)]
    (tmp_path / "data").write_text("2")
    fingerprints.append(model.fingerprint())
    monkeypatch.setattr(imitation, "version", lambda library: "0")
    fingerprints.append(model.fingerprint())
    assert fingerprints[0] == fingerprints[1] and len(set(fingerprints)) == 4


def test_cache_folder(monkeypatch):
    monkeypatch.delenv("TRL_MULTIAGENT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/trl_multiagent")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/trl_multiagent")
    monkeypatch.setenv("TRL_MULTIAGENT_CACHE", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")


def test_a_cache_of_others_is_refused(builds, monkeypatch):
    (path,) = {SMALL.path(progress=False) for _ in range(2)}
    weights, cache = Path(path, "model.safetensors"), cache_folder()
    content = weights.read_bytes()
    other = Path(path, "adapter_config.json")
    for change in (lambda: weights.write_bytes(content[:-1] + b"x"), other.touch):
        change()
        with pytest.raises(ValueError, match=f"{path} was changed after it was built, or is damaged"):
            SMALL.path(progress=False)
        weights.write_bytes(content)
    other.unlink()
    assert SMALL.path(progress=False) == path and len(builds) == 1
    for mode in (0o777, 0o770):
        cache.chmod(mode)
        with pytest.raises(ValueError, match=r"must be yours or root's, .* TRL_MULTIAGENT_CACHE"):
            SMALL.path(progress=False)
    cache.chmod(0o755)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    uid = cache.stat().st_uid
    if uid == 0:  # root's is taken
        assert SMALL.path(progress=False) == path
        os.chown(cache, 1001, -1)
    with pytest.raises(ValueError, match="must be yours or root's"):
        SMALL.path(progress=False)
    os.chown(cache, uid, -1)


def test_building_is_reproducible_and_leaves_the_caller_alone(small_build, tmp_path):
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()
    SMALL.build(tmp_path / "again", progress=False)
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
    assert len(tokenizer) == model.config.vocab_size <= imitation.VOCABULARY
    for text in ("def aux(xs):\n    return [x for x in xs if x > 5]\n", "  Ω\tπ \r\n 🙂 a , b ."):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert list(tokenizer("x")) == ["input_ids", "attention_mask"]

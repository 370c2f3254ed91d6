import gc
import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from pathlib import Path

import pytest
import torch

from forked import Forked
from tiny import byte_tokenizer, tiny_llama


SHARED = Path(__file__).resolve().parents[2] / "shared"
torch.set_num_threads(1)  # the models here are too small to share


def pytest_collection_finish():
    """What is imported stays: trainers, which collect garbage at every turn, need not look through it each time."""
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real benchmark files beside the checkout."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"no benchmark data in {SHARED / 'data'}")
    return SHARED / "data"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Folder of a tiny random Llama with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_model")
    tiny_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def forked():
    """Runs scripts in forked processes."""
    forked = Forked()
    yield forked
    forked.close()


@pytest.fixture(scope="session", autouse=True)
def no_locks_of_others(tmp_path_factory):
    """
    DeepSpeed's operators are built in a folder of this run. In the user's own, a lock that a killed process left behind
    would be waited for without end.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path_factory.mktemp("torch_extensions"))

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


# The files that take longest, in this order. When workers share the tests, these start first, and all workers end together
LONGEST = """
test_distributed_forms test_benchmarks test_demo_run test_checkpoints test_hostile test_together test_team_forms
test_code_generation test_limits test_hub test_router_loss test_two_hosts test_vllm_generation test_magrpo_update
""".split()


def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" in os.environ:
        rank = {name: k for k, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


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

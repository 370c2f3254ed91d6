"""
Runs vLLM itself, on the CPU: `make test-vllm`. Where vLLM is not installed, this folder has no tests.

What the CPU needs is set here: variables without which vLLM compiles for minutes or binds this process to cores,
engines of a few megabytes, and no packed copies of weights, which vLLM for the CPU does not update.
"""

import importlib.util
import os

import pytest

from cpu_vllm import Server
from cpu_vllm_server import without_packed_weights
from tiny import byte_tokenizer, tiny_llama


if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ |= {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
    }


@pytest.fixture(scope="session", autouse=True)
def engines():
    """The engines that were made, with which arguments."""
    from trl.generation import vllm_generation

    made, real = [], vllm_generation.LLM
    without_packed_weights()

    def small(**arguments):
        made.append((real(**arguments, enforce_eager=True, kv_cache_memory_bytes=1 << 25), arguments))
        return made[-1][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_generation, "LLM", small)
        yield made


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """Two different models in folders, one of them with a tied head. vLLM's kernels need a head size of 32."""
    folders = {}
    for seed, role in enumerate(("aux", "main")):
        folders[role] = str(tmp_path_factory.mktemp(role))
        tiny_llama(seed, hidden_size=64, tie_word_embeddings=role == "aux").save_pretrained(folders[role])
        byte_tokenizer().save_pretrained(folders[role])
    return folders


@pytest.fixture(scope="session")
def lora_server(models, tmp_path_factory):
    server = Server(
        tmp_path_factory.mktemp("lora"), models["aux"], "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"
    )
    yield server
    server.kill()


@pytest.fixture(scope="session")
def full_servers(models, tmp_path_factory):
    servers = {role: Server(tmp_path_factory.mktemp(role), model) for role, model in models.items()}
    yield {role: server.url for role, server in servers.items()}
    for server in servers.values():
        server.kill()

"""
Runs vLLM itself, on the CPU: `make test-vllm`. Where vLLM is not installed, this folder has no tests.

What the CPU needs is set here: variables without which vLLM compiles for minutes or binds this process to cores, engines of a few megabytes,
and no packed copies of weights, which vLLM for the CPU does not update.
"""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from trl_multiagent import AgentTeam, MAGRPOTrainer

from tiny import byte_tokenizer, tiny_llama, tiny_trainer


collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

os.environ |= {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
}
SERVER = ["--max-model-len", "256", "--max-num-seqs", "64", "--enforce-eager", "--dtype", "float32"]
SERVER += ["--kv-cache-memory-bytes", str(1 << 25), "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
TRAINING = {"max_steps": 3, "num_turns": 2, "temperature": 0.8, "optim": "sgd", "learning_rate": 0.5, "seed": 7}
TRAINING |= {"per_device_train_batch_size": 16, "use_vllm": True, "vllm_max_model_length": 256}


@pytest.fixture(scope="session", autouse=True)
def engines():
    """The engines that were made, with which arguments."""
    from serve import without_packed_weights
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


def make_team(form: str, models: dict[str, str]) -> AgentTeam:
    if form == "full":
        return AgentTeam.from_pretrained(list(models.values()), roles=list(models), dtype=torch.float32)
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    kwargs = {"share_weights": True} if form == "shared" else {"peft_config": lora}
    return AgentTeam.from_pretrained(models["aux"], list(models), dtype=torch.float32, **kwargs)


class Compared(MAGRPOTrainer):
    """Compares the log-probability of every token that vLLM sampled with that of the trainer's weights."""

    def _sample(self, nodes, num_generations):
        samples = super()._sample(nodes, num_generations)
        for role, of_role in samples.items():
            self.__dict__.setdefault("largest", []).append(largest_difference(self, role, of_role))
        return samples


@torch.no_grad()
def largest_difference(trainer, role, samples) -> float:
    largest = 0.0
    with trainer.team.evaluating(), trainer.team.activate(role) as agent:
        for s in samples:
            for ids, sampled in zip(s.completion_ids, s.logps, strict=True):
                logits = agent(torch.tensor([[*s.prompt_ids, *ids]])).logits[0, len(s.prompt_ids) - 1 : -1].float()
                logps = (logits / trainer.args.temperature).log_softmax(-1)
                own = logps.gather(1, torch.tensor(ids)[:, None])[:, 0]
                largest = max(largest, (own - torch.tensor(sampled)).abs().max().item())
    return largest


def train(tmp_path, team, resume=None, **settings):
    """Trains a team and checks all log-probabilities, and that a step changes the weights by much more than they may differ."""
    start = {name: x.clone() for name, x in team.state_dict().items()}
    trainer = tiny_trainer(tmp_path, team, trainer=Compared, **{**TRAINING, **settings})
    assert trainer.accelerator.num_processes == 1 and trainer.accelerator.distributed_type == "NO"
    trainer.train(resume_from_checkpoint=resume)
    assert len(trainer.largest) >= 4 and max(trainer.largest) < 1e-4
    change = max((x - start[name]).abs().max() for name, x in team.state_dict().items())
    assert change > 1e-2
    return trainer


def check_stop_strings(samples, strings) -> None:
    """Checks that completions end with the token that completes a string, and nowhere else."""
    tokenizer, ended = byte_tokenizer(), 0
    for ids in [ids for completions in samples for ids in completions.ids]:
        texts = [tokenizer.decode(ids[: k + 1]) for k in range(len(ids))]
        found = [any(string in text for string in strings) for text in texts]
        assert not any(found[:-1]) and (found[-1] or len(ids) == 8)
        ended += found[-1]
    assert ended >= 4


class Server:
    """A vLLM server in a process of its own."""

    def __init__(self, folder: Path, model: str, *options: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        command = [sys.executable, str(Path(__file__).parent / "serve.py"), "--host", "127.0.0.1", "--port", str(port)]
        self.log = folder / f"{port}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--model", model, *SERVER, *options],
                env={**os.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


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

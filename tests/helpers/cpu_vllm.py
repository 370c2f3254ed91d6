"""Teams, trainers and servers for the tests with vLLM itself."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from peft import LoraConfig

from trl_multiagent import AgentTeam, MAGRPOTrainer

from tiny import byte_tokenizer, tiny_trainer


SERVER = ["--max-model-len", "256", "--max-num-seqs", "64", "--enforce-eager", "--dtype", "float32"]
SERVER += ["--kv-cache-memory-bytes", str(1 << 25), "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
TRAINING = {"max_steps": 3, "num_turns": 2, "temperature": 0.8, "optim": "sgd", "learning_rate": 0.5, "seed": 7}
TRAINING |= {"per_device_train_batch_size": 16, "use_vllm": True, "vllm_max_model_length": 256}


ONLY_ABC = {"allowed_token_ids": byte_tokenizer()("abc")["input_ids"]}


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
    """
    Trains a team and checks all log-probabilities, and that a step changes the weights by much more than they may
    differ.
    """
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
    for ids in [ids for completions in samples for ids in completions]:
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
        command = [sys.executable, str(Path(__file__).with_name("cpu_vllm_server.py"))]
        command += ["--host", "127.0.0.1", "--port", str(port)]
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

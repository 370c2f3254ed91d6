"""
Samples through vLLM's double in two processes that have different numbers of prompts. Run by
`test_vllm_generation.py`.
"""

import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from trl_multiagent import AgentTeam
from trl_multiagent.trainers.base import vllm

import vllm_double
from process_group import end_process_group
from tiny import byte_tokenizer, count_reward, tiny_environment, tiny_items, tiny_trainer


class Patch:
    """What `vllm_double.install` needs of pytest's monkeypatch, for good."""

    def setattr(self, target, name, value, raising=True):
        setattr(target, name, value)

    def setitem(self, target, name, value):
        target[name] = value


def play(mode: str, folder: str, output: str, where: dict) -> dict:
    model = AutoModelForCausalLM.from_pretrained(folder)
    rank = int(os.environ["RANK"])

    def reward(completions, **columns):  # the trees of the first process end after one turn
        return [x + 100.0 * (rank == 0) for x in count_reward(completions)]

    team = AgentTeam({"solo": model}, {"solo": byte_tokenizer()})
    settings = {"items_per_device": 1, "num_turns": 2, "early_termination_threshold": 50.0, "max_steps": 2}
    settings |= {"train_dataset": tiny_items(8), "use_vllm": True, "vllm_mode": mode, **where}
    trainer = tiny_trainer(output, team, tiny_environment(("solo",), reward), **settings)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    differences = [entry["agents/solo/sampling_logp_difference"] for entry in logs]
    return {"nodes": [len(nodes) for nodes in trainer._turns], "differences": differences}


def share_adapters(folder: str, output: str) -> dict:
    """The folders through which an engine in each process gets adapters, with and without room in memory."""
    paths: dict[str, str] = {}
    vllm.MEMORY = Path(output) / "memory"
    vllm.MEMORY.mkdir(exist_ok=True)
    for place, room in (("disk", 1e30), ("memory", 4)):
        vllm.ROOM = room
        team = AgentTeam.from_pretrained(folder, ["aux", "main"], LoraConfig(r=4, target_modules="all-linear"))
        settings = {"max_steps": 2, "train_dataset": tiny_items(8), "use_vllm": True}
        trainer = tiny_trainer(f"{output}/out", team, **settings)
        trainer.train()
        generation = trainer.generator.agents["main"]
        paths[place] = generation.llm.requests["main"].lora_path
    trainer.accelerator.wait_for_everyone()
    left = len([*vllm.MEMORY.glob("*/*")])
    trainer.accelerator.wait_for_everyone()  # no process ends before
    return {"paths": paths, "written": sorted(generation.last_folders), "left": left}


def main(output: str, folder: str, url: str, port: str):
    torch.set_num_threads(1)
    vllm_double.install(Patch())
    server = {"vllm_server_base_url": url, "vllm_group_port": int(port)}
    results = {
        "server": play("server", folder, output, server),
        "colocate": play("colocate", folder, output, {"vllm_tensor_parallel_size": 2}),
        "adapters": share_adapters(folder, output),
    }
    torch.save(results, f"{output}/{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
    end_process_group()

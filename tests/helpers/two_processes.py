"""Three updates on completions that depend on nothing but the prompt. Run by `test_two_processes.py`, also under a launcher."""

import sys
import zlib

import torch

from trl_multiagent import MAGRPOTrainer
from trl_multiagent.rollout.tree import Samples

from process_group import end_process_group
from tiny import tiny_items, tiny_trainer


class Deterministic(MAGRPOTrainer):
    def _sample(self, nodes, num_generations):
        return {role: self._sample_agent(role, nodes) for role in self.team.roles}

    def _sample_agent(self, role, nodes):
        samples = []
        for prompt_ids in (prompt.ids for prompt in self.sampler.prompts(role, nodes)):
            generator = torch.Generator().manual_seed(zlib.crc32(bytes(prompt_ids)))
            lengths = torch.randint(2, 9, (4,), generator=generator).tolist()
            ids = [torch.randint(33, 122, (length,), generator=generator).tolist() for length in lengths]
            samples.append(Samples(prompt_ids, ids, self.team.tokenizers[role].batch_decode(ids)))
        return samples


def update(output: str, items_per_device: int, micro_batch: int, beta: float):
    trainer = tiny_trainer(
        f"{output}/{beta}",
        trainer=Deterministic,
        train_dataset=tiny_items(12),
        items_per_device=items_per_device,
        per_device_train_batch_size=micro_batch,
        num_turns=2,
        early_termination_threshold=0.12,
        beta=beta,
        max_steps=3,
        optim="sgd",
        learning_rate=0.5,
        log_completions=True,
        num_completions_to_print=1,
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        assert trainer.accelerator.num_processes == 1 or not trainer.model_wrapped.find_unused_parameters
        log = [entry for entry in trainer.state.log_history if "reward" in entry]
        result = {"weights": trainer.team.state_dict(), "log": log, "processes": trainer.accelerator.num_processes}
        torch.save(result, f"{output}/{beta}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for beta in (0.0, 0.1):
        update(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), beta)
    end_process_group()

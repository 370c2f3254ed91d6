"""
Processor time of an agent's update, with rows that share what they have in common and with rows of their own.

    python -m benchmarks.engine.packed            # minutes on one core
    python -m benchmarks.engine.packed --smoke    # seconds: whether it runs; its numbers mean nothing

A random Llama of 2.1 M parameters, forward and backward of all rows of rollout trees with four completions per prompt,
in float32 on one thread. Packed rows are computed in one pass, rows of their own in a pass for each prompt, which has
the least padding. `checkpointed` recomputes activations, which is TRL's default; `kept` does not. The contenders take
turns, and the table has medians.
"""

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trl_multiagent.rollout.tree import Samples
from trl_multiagent.team.agent_team import run_agent
from trl_multiagent.trainers.base import batch
from trl_multiagent.trainers.base.batch import Row, agent_tensors, forward_inputs


VOCABULARY, NUM_GENERATIONS = 1024, 4
PROMPT, COMPLETION, FEEDBACK = 120, 40, 30  # the most tokens of each
ITEMS = {1: 8, 2: 2, 3: 1}  # by number of turns
FORMS = ("kept, own rows", "kept, packed", "checkpointed, own rows", "checkpointed, packed")


def tree_rows(num_turns: int, num_items: int) -> list[Row]:
    """
    The rows of whole trees. Prompts and completions have different lengths, and a child's prompt continues its
    parent's row.
    """
    generator = torch.Generator().manual_seed(0)

    def tokens(most: int) -> list[int]:
        length = int(torch.randint(most // 2, most + 1, (), generator=generator))
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    rows: list[Row] = []
    prompts = [tokens(PROMPT) for _ in range(num_items)]
    for turn in range(num_turns):
        following = []
        for prompt in prompts:
            completions = [tokens(COMPLETION) for _ in range(NUM_GENERATIONS)]
            samples = {"agent": Samples(prompt, completions, [""] * NUM_GENERATIONS)}
            rows += [Row(turn, samples, g, {"agent": g - 1.5}) for g in range(NUM_GENERATIONS)]
            following += [[*prompt, *completion, *tokens(FEEDBACK)] for completion in completions]
        prompts = following
    return rows


def update(model: LlamaForCausalLM, rows: list[Row], form: str) -> tuple[float, int, float]:
    """
    Returns the processor time of a forward and a backward, the number of positions, and the norm of the gradient.
    """
    model.zero_grad()
    switch = (
        model.activation_checkpointing_enable if "checkpointed" in form else model.activation_checkpointing_disable
    )
    switch()
    own = "own" in form
    patch = mock.patch.object(batch, "can_pack", return_value=False) if own else contextlib.nullcontext()
    size = NUM_GENERATIONS if own else len(rows)
    parts = [agent_tensors(rows[k : k + size], "agent", 0, [1]) for k in range(0, len(rows), size)]
    positions, start = 0, time.process_time()
    for part in parts:
        with patch:
            inputs = forward_inputs(model, part)
        log_probs = run_agent(model, None, **inputs).log_probs[:, -part.completion_ids.size(1) :]
        ((log_probs * part.completion_mask).sum(dim=1) * part.advantages).sum().div(-len(rows)).backward()
        positions += inputs["input_ids"].numel()
    seconds = time.process_time() - start
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    return seconds, positions, norm.item()


def measure(model: LlamaForCausalLM, rows: list[Row], repetitions: int) -> dict:
    results: dict[str, list[tuple[float, int, float]]] = {}
    for _ in range(repetitions + 1):
        for form in FORMS:
            results.setdefault(form, []).append(update(model, rows, form))
    norms = [of_form[0][2] for of_form in results.values()]
    assert max(norms) - min(norms) < 1e-4 * max(norms), f"the updates differ: {norms}"
    needed = sum(len(row.samples["agent"].prompt_ids) + len(row.trained_ids("agent", (), False)) for row in rows)
    positions = {form: of_form[0][1] for form, of_form in results.items()}
    seconds = {form: statistics.median(x for x, *_ in of_form[1:]) for form, of_form in results.items()}
    return {"rows": len(rows), "tokens": needed, "positions": positions, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--smoke", action="store_true", help="seconds: one turn of one item")
    parser.add_argument("--repetitions", type=int, default=5, help="of every contender (default: 5)")
    parser.add_argument("--output", type=Path, default=Path("packed.json"), help="where the JSON goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=4096, **size)).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    print(f"{'turns':8}{'rows':>6}{'positions':>16}{'':4}" + "".join(f"{form:>26}" for form in FORMS) + "   ratios")
    results = {}
    for num_turns, num_items in ITEMS.items() if not options.smoke else [(1, 1)]:
        rows = tree_rows(num_turns, num_items)
        found = results[num_turns] = measure(model, rows, 1 if options.smoke else options.repetitions)
        positions, seconds = list(found["positions"].values()), list(found["seconds"].values())
        ratios = f"{seconds[0] / seconds[1]:.2f}, {seconds[2] / seconds[3]:.2f}"
        times = "".join(f"{x:24.3f} s" for x in seconds)
        print(f"T = {num_turns:<4}{len(rows):6}{positions[0]:8} to {positions[1]:<8}{times}   {ratios}", flush=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

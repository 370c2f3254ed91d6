"""
The floor of a step of `steps.py`: the processor time of the products with the agents' weights alone, in float32,
as few and as large as they can be. Attention, norms, drawing tokens, the optimizer and everything in Python come on
top.
"""

import statistics
from collections.abc import Callable

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.comlrl.task import clocks


ROWS = 512  # of a product of the update, where more make it no faster
REPETITIONS = 5


def floor(model: str, work: dict[str, int], threads: int) -> dict[str, float]:
    """The seconds that sampling and update take at least. `work`: the result of `team_run.work`."""
    torch.set_num_threads(threads)
    agent = AutoModelForCausalLM.from_pretrained(model)
    head = agent.get_output_embeddings().weight
    body = [x.weight for x in agent.modules() if isinstance(x, nn.Linear) and x.weight is not head]
    sampled, read = work["sampled_tokens"], work["tokens"] - work["sampled_tokens"]
    rows = max(1, sampled // work["decoding_steps"])
    decoding = work["decoding_steps"] * seconds([*body, head], rows, forward)
    generate = decoding + read / ROWS * seconds(body, ROWS, forward)
    update = work["tokens"] / ROWS * seconds(body, ROWS, forward_and_backward)
    update += sampled / ROWS * seconds([head], ROWS, forward_and_backward)
    return {"step": generate + update, "generate": generate, "update": update}


def forward(x: torch.Tensor, weight: torch.Tensor) -> None:
    x @ weight.T


def forward_and_backward(x: torch.Tensor, weight: torch.Tensor) -> None:
    y = x @ weight.T
    y @ weight
    y.T @ x


@torch.no_grad()
def seconds(weights: list[torch.Tensor], rows: int, products: Callable) -> float:
    """The processor time of the products of some rows with all weights, the median of several runs."""
    inputs = {weight.size(1): torch.ones(rows, weight.size(1)) for weight in weights}
    runs = []
    for _ in range(REPETITIONS):
        start = clocks()[1]
        for weight in weights:
            products(inputs[weight.size(1)], weight)
        runs.append(clocks()[1] - start)
    return statistics.median(runs)

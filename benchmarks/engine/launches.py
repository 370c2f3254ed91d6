"""
Counts what a step launches, on a CPU: kernels of the update of a micro-batch and of a sampled token.

    python -m benchmarks.engine.launches           # about 4 minutes on one core
    python -m benchmarks.engine.launches --smoke   # seconds: one layer

A launch is an operation of torch that is no view. Their number does not depend on the width of a model, so the models
are Qwen2 with the depth of a real one and a tiny width. Products are in bfloat16 (autocast), adapters of rank 16 on
all linear layers in float32, their base in bfloat16. Every row has a prompt, which four rows share, and a completion.
The update is forward and backward of one micro-batch; clipping and the optimizer are about 20 launches more.

For comparison: a micro-batch of transformers, of transformers with PEFT, and of TRL's GRPOTrainer, and the same rows
as CoMLRL 1.4.3 computes them, which is every sequence alone, one agent after the other, and every token's loss.
"""

import argparse
import contextlib
import io
import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache, run_fw_bw_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import GRPOConfig, GRPOTrainer

from trl_multiagent import AgentTeam, FunctionEnvironment, MAGRPOConfig, MAGRPOTrainer
from trl_multiagent.models import sampling_loop
from trl_multiagent.rollout.sampler import TransformersGenerator, TurnPrompts
from trl_multiagent.rollout.sampling_arguments import sampling_arguments
from trl_multiagent.rollout.tree import Node, Samples


NO_LAUNCHES = set(
    """
    view _unsafe_view reshape transpose permute unsqueeze squeeze expand slice select t alias detach as_strided split
    unbind split_with_sizes _reshape_alias lift_fresh empty empty_like new_empty new_empty_strided empty_strided
    sym_size sym_stride unsafe_split chunk narrow is_same_size unfold _local_scalar_dense
    """.split()
)
PROMPT, COMPLETION, GENERATIONS, VOCABULARY = 24, 8, 4, 256


class Launches(TorchDispatchMode):
    """Counts the launches within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name not in NO_LAUNCHES:
            self.kinds[name] += 1
        return function(*args, **(kwargs or {}))

    @property
    def number(self) -> int:
        return self.kinds.total()


def count(function: Callable[[], Any]) -> int:
    with Launches() as launches:
        function()
    return launches.number


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(VOCABULARY)}, unk_token="w2"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def model(layers: int, dtype: torch.dtype = torch.float32, adapters: list[str] | None = None) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": True}
    config = Qwen2Config(vocab_size=VOCABULARY, num_hidden_layers=layers, **size, **special)
    made: Any = Qwen2ForCausalLM(config).to(dtype)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    for k, name in enumerate(adapters or []):
        if k == 0:
            made = get_peft_model(made, lora, adapter_name=name)
        else:
            made.add_adapter(name, lora)
    return made


def make_team(form: str, num_agents: int, layers: int) -> AgentTeam:
    """A team of `"full"` models, of `"lora"` agents on one base, or `"mixed"`, in which the last agent is full."""
    roles = [f"agent_{k}" for k in range(num_agents)]
    adapted = {"full": [], "lora": roles, "mixed": roles[:-1]}[form]
    base = model(layers, torch.bfloat16, adapted) if adapted else None
    return AgentTeam({x: base if x in adapted else model(layers) for x in roles}, {x: tokenizer() for x in roles})


class Counted:
    """Counts the launches of the updates of micro-batches, of completions that no model sampled."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with Launches() as self.launches:
            loss = super().training_step(*args, **kwargs)
        self.counts = [*getattr(self, "counts", []), self.launches.number]
        return loss

    def _generate_and_score_completions(self, inputs: list[dict]) -> Any:
        batches = super()._generate_and_score_completions(inputs)
        self.launches.kinds.clear()
        return batches


class CountedMAGRPO(Counted, MAGRPOTrainer):
    def _sample(self, nodes: list[Node], num_generations: int) -> dict[str, list[Samples]]:
        return {role: [fixed_samples(role, node.tree, num_generations) for node in nodes] for role in self.team.roles}


class Prepared(GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        prompts, completions = sequences(len(inputs)).split([PROMPT, COMPLETION], dim=1)
        masks = {"prompt_mask": torch.ones_like(prompts), "completion_mask": torch.ones_like(completions)}
        numbers = {"advantages": torch.linspace(-1, 1, len(inputs)), "num_items_in_batch": completions.sum()}
        return {"prompt_ids": prompts, "completion_ids": completions, **masks, **numbers}


class CountedGRPO(Counted, Prepared):
    pass


def fixed_samples(role: str, item: int, num_generations: int) -> Samples:
    draw = torch.Generator().manual_seed(100 * item + len(role))
    prompt = torch.randint(3, VOCABULARY, (PROMPT,), generator=draw).tolist()
    completions = torch.randint(3, VOCABULARY, (num_generations, COMPLETION), generator=draw).tolist()
    return Samples(prompt, completions, [str(ids[0]) for ids in completions])


def update(team: AgentTeam, rows: int, rows_per_forward: int, checkpointing: bool) -> list[int]:
    """Takes a step with `rows` completions of each agent. Returns the launches of each micro-batch."""
    environment = FunctionEnvironment(
        dict.fromkeys(team.roles, "w5"), lambda completions, **_: [float(x[team.roles[0]]) for x in completions]
    )
    with tempfile.TemporaryDirectory() as folder:
        args = MAGRPOConfig(
            items_per_device=rows // GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=COMPLETION,
            **arguments(folder, rows_per_forward, checkpointing),
        )
        trainer = CountedMAGRPO(team, environment, args, Dataset.from_dict({"x": list(range(rows))}))
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    return [number for number in trainer.counts if number > 0]  # without empty micro-batches


def arguments(folder: str, rows_per_forward: int, checkpointing: bool) -> dict[str, Any]:
    common = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": True}
    common |= {"output_dir": folder, "max_steps": 1, "per_device_train_batch_size": rows_per_forward}
    return common | {"gradient_checkpointing": checkpointing}


def token(team: AgentTeam) -> float:
    """Returns the launches of a sampled token of all agents, in the form that a CUDA graph replays."""
    prompts = {role: [fixed_samples(role, k, 1).prompt_ids for k in range(2)] for role in team.roles}
    nodes = {role: [Node({}, (), {}, tree=k) for k in range(2)] for role in team.roles}

    def sample(number: int) -> int:
        settings = sampling_arguments({"max_new_tokens": number, "min_new_tokens": None})
        generator = TransformersGenerator(team, settings, seed=0)
        with autocast():
            return count(lambda: generator.generate(TurnPrompts(nodes, prompts, GENERATIONS)))

    with (
        mock.patch.object(AgentTeam, "end_tokens", lambda self, role: [VOCABULARY]),  # no row ends early
        mock.patch.object(sampling_loop, "replays", lambda device: True),
        mock.patch.object(sampling_loop, "period_of", lambda device: 100),
    ):
        return (sample(12) - sample(4)) / 8


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def sequences(rows: int) -> torch.Tensor:
    samples = [fixed_samples("", k, GENERATIONS) for k in range(rows // GENERATIONS)]
    return torch.tensor([x.prompt_ids + ids for x in samples for ids in x.completion_ids])


def prepared(form: str, layers: int, checkpointing: bool) -> Any:
    """One model as transformers, or transformers with PEFT, train it."""
    made = model(layers, torch.bfloat16, ["default"]) if form == "lora" else model(layers)
    if checkpointing:
        made.enable_input_require_grads()
        made.gradient_checkpointing_enable({"use_reentrant": False})
    return made.train()


def transformers_update(form: str, layers: int, rows: int, checkpointing: bool) -> int:
    made, ids = prepared(form, layers, checkpointing), sequences(rows)

    def compute() -> None:
        with autocast():
            loss = made(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    return count(compute)


def trl_update(form: str, layers: int, rows: int, checkpointing: bool) -> int:
    made = model(layers, torch.bfloat16, ["default"]) if form == "lora" else model(layers)
    made.config._name_or_path = "a model"
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(beta=0.0, num_generations=GENERATIONS, **arguments(folder, rows, checkpointing))
        data = Dataset.from_dict({"prompt": ["w5"] * rows})
        trainer = CountedGRPO(made, lambda completions, **_: [0.0], args, data, processing_class=tokenizer())
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    return trainer.counts[0]


def compiled_layer(form: str) -> int:
    """
    Returns the launches of a compiled layer: products, attention, and at most one for each loop that inductor makes.
    """
    made, ids = prepared(form, 1, checkpointing=False), sequences(8)
    for layer in made.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True)

    def compute() -> torch.Tensor:
        with autocast():
            return made(input_ids=ids, labels=ids, use_cache=False).loss

    metrics.reset()
    with fresh_cache():
        _, codes = run_fw_bw_and_get_code(compute)
    calls = [re.findall(r"extern_kernels\.\w+\(|aten\._scaled_dot_product\w+\.default\(", code) for code in codes]
    return metrics.generated_kernel_count + sum(map(len, calls))


def sequence_by_sequence(form: str, layers: int, rows: int, num_agents: int) -> int:
    """Every sequence is a forward, and every token of a completion a softmax over the vocabulary."""
    agents = [prepared(form, layers, checkpointing=False) for _ in range(num_agents)]

    def compute() -> None:
        for agent in agents:
            losses = []
            for ids in sequences(rows):
                with autocast():
                    logits = agent(input_ids=ids[None], use_cache=False).logits[0, PROMPT - 1 : -1]
                tokens = [x.log_softmax(-1)[y] for x, y in zip(logits, ids[PROMPT:], strict=True)]
                losses.append(torch.stack(tokens).sum())
            torch.stack(losses).mean().backward()

    return count(compute)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--smoke", action="store_true", help="seconds: one layer, two agents")
    parser.add_argument("--layers", type=int, default=24, help="layers of a model (default: 24)")
    parser.add_argument("--output", type=Path, default=Path("launches.json"), help="where the JSON goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers, numbers = (1, [1, 2]) if options.smoke else (options.layers, [1, 2, 4])
    results = {}

    def show(name: str, *cells: float) -> None:
        results[name] = cells
        print(f"{name:44}" + "".join(f"{cell:14,.0f}" for cell in cells), flush=True)

    print(f"{'8 rows of each agent, forward and backward':44}{'checkpointing':>14}{'without':>14}")
    for form in ("full", "lora"):
        for name, compute in {"transformers": transformers_update, "TRL": trl_update}.items():
            show(f"{name}, {form}", *(compute(form, layers, 8, x) for x in (True, False)))
        show(f"sequence by sequence, {form}, 2 agents", sequence_by_sequence(form, layers, 8, 2))
    for form in ("full", "lora", "mixed"):
        for number in numbers[form == "mixed" :]:
            ways = [update(make_team(form, number, layers), 8, 8, x)[0] for x in (True, False)]
            show(f"trl_multiagent, {form}, {number} agents", *ways)
    print(f"\n{'a step, 32 rows of each of two agents':44}{'4 x 8 rows':>14}{'1 x 32 rows':>14}")
    for form in ("full", "lora"):
        step = [sum(update(make_team(form, 2, layers), 32, *way)) for way in ((8, True), (32, False))]
        show(f"{form}, with and without checkpointing", *step)
    if not options.smoke:  # it takes a C++ compiler half a minute
        print(f"\n{'a layer of one model, forward and backward':44}{'eager':>14}{'compiled':>14}")
        for form in ("full", "lora"):
            eager = transformers_update(form, 2, 8, False) - transformers_update(form, 1, 8, False)
            show(f"a layer, {form}", eager, compiled_layer(form))
    print(f"\n{'a token of all agents, as a graph replays it':44}{'launches':>14}")
    for form, number in itertools.product(("full", "lora"), numbers):
        show(f"token, {form}, {number} agents", token(make_team(form, number, layers)))
    options.output.write_text(json.dumps({"layers": layers, "launches": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()

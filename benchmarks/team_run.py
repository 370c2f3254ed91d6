"""
What the benchmarks have in common: the machine, random models, clocks, and what `memory/` and `engine/gpu.py` measure:
training steps of a team on a random model, in processes of their own.

[`launch`] starts the processes, each of which runs this file and measures itself. Needs Linux, and no network.

What is measured, per process:
- held: bytes held when the optimizer is about to step, that is weights, gradients and the optimizer's state; under
  DeepSpeed when it has stepped, where ZeRO-1 and -2 have freed their gradients and ZeRO-3 has not. On a GPU, what
  torch has allocated; on the CPU, the bytes of all tensors that Python can reach: exact, and the same in every run;
- generate, update: the most that was in use while the trees were played and critics judged them, and in the rest of
  the step, activations, gathered weights and temporary copies included. On a GPU, what torch had allocated; on the
  CPU, the resident size of the process less what it was before the team was loaded (`libraries`). Every allocation
  from 64 KiB on goes back to the system when it is freed (`MALLOC_MMAP_THRESHOLD_`), so that no reserve is counted;
- seconds: wall time of an optimizer step, rollouts included; phases: that of its parts, on a GPU until the device has
  finished;
- reads, on a GPU: how often the host waits for the device in a step, by the line of Python that makes it wait.
  Counting them slows the step, so it is one more step at the end;
- launches, profile: of the update of that step, the operations that are no views, and with `profiles` the seconds of
  the device (on a CPU: of the host) in the slowest of them.

The first step makes the optimizer's state and is left out. A CPU stands in for devices: each process has its own
threads.
"""

import contextlib
import gc
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
import warnings
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_pt_utils import get_model_param_count

from benchmarks.engine.launches import Launches
from trl_multiagent import (
    AgentTeam,
    FunctionEnvironment,
    IACConfig,
    IACTrainer,
    MAACConfig,
    MAACTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAREINFORCETrainer,
)
from trl_multiagent.models import sampling_loop


REPOSITORY = Path(__file__).resolve().parent.parent
MIB = 2**20
# Name: file in accelerate_configs, number of processes
LAUNCHES = {
    "one process": ("single", 1),
    "DDP": ("ddp", 2),
    "ZeRO-1": ("zero1", 2),
    "ZeRO-2": ("zero2", 2),
    "ZeRO-3": ("zero3", 2),
    "ZeRO-3, offload": ("zero3_offload", 2),
}


# The command's side


def save_model(folder: Path, hidden_size: int, num_layers: int) -> int:
    """Writes a random Llama whose tokens are bytes, and returns its number of parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        eos_token_id=256,
        pad_token_id=257,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model.num_parameters()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, an end-of-sequence and a padding token."""
    vocabulary = {character: k for k, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<eos>": 256, "<pad>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def launch(name: str, settings: dict, on_gpus: bool, threads: int, timeout: float) -> list[dict]:
    """
    Runs a team and returns what each process measured.

    Args:
        name (`str`): One of `LAUNCHES`.
        settings (`dict`): Arguments of [`run`].
        on_gpus (`bool`): Whether to use GPUs, one per process, or the CPU.
        threads (`int`): Threads of each process.
        timeout (`float`): Seconds after which the run is ended.
    """
    config, num_processes = LAUNCHES[name]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", f"{REPOSITORY}/accelerate_configs/{config}.yaml"]
    launcher += ["--num_processes", str(num_processes), "--main_process_port", "0"]
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+") as log:
        command = [sys.executable, *launcher, __file__, json.dumps(settings), folder]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            process.wait(timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the launcher's processes too
            raise
        if process.returncode != 0:
            raise RuntimeError(f"{name} failed. Its last words:\n{Path(log.name).read_text()[-6000:]}")
        return [json.loads(Path(f"{folder}/{k}.json").read_text()) for k in range(num_processes)]


def run_here(settings: dict) -> list[dict]:
    """The same in this process, for a first look: its memory holds what was there before."""
    with tempfile.TemporaryDirectory() as folder:
        return [run(Path(folder), **settings)]


def machine() -> dict:
    devices = torch.cuda.device_count()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(k) for k in range(devices)],
        "load": os.getloadavg(),
        "python": sys.version.split()[0],
    }


class Clock:
    """Wall time and processor time since its creation."""

    def __init__(self, children: bool = False):
        self.children = children
        self.start = self.now()

    def now(self) -> tuple[float, float]:
        times = os.times()
        return time.perf_counter(), sum(times[2:4] if self.children else times[:4])

    def facts(self) -> dict[str, float]:
        wall, processor = (end - start for start, end in zip(self.start, self.now(), strict=True))
        return {"seconds": wall, "cpu_seconds": processor}


# A process's side


class MeasuredMixin:
    """Tells the rollouts from the update: their peak memory, their time, and how much there is to compute."""

    is_watched = profiles = False  # whether the update of this step is counted, and profiled

    def _sample(self, *args, **kwargs):
        with self.timed("generate"):
            return super()._sample(*args, **kwargs)

    def _score(self, *args, **kwargs):
        with self.timed("reward"):
            return super()._score(*args, **kwargs)

    @contextlib.contextmanager
    def timed(self, phase):
        start = now()
        yield
        self.phases[phase] += now() - start

    def _play_trees(self, items):
        self.phases = dict.fromkeys(("generate", "reward"), 0.0)
        turns = super()._play_trees(items)
        self.work = work(turns, self.team.roles)
        return turns

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.peak_of_rollouts = peak()
        reset_peak()
        if self.is_watched:
            self.launches = self.watch.enter_context(Launches())
            self.profile = self.watch.enter_context(torch.profiler.profile()) if self.profiles else None
        return batch


class MeasuredMAGRPO(MeasuredMixin, MAGRPOTrainer):
    pass


class MeasuredMAREINFORCE(MeasuredMixin, MAREINFORCETrainer):
    pass


class MeasuredIAC(MeasuredMixin, IACTrainer):
    pass


class MeasuredMAAC(MeasuredMixin, MAACTrainer):
    pass


TRAINERS = {
    "magrpo": (MeasuredMAGRPO, MAGRPOConfig),
    "mareinforce": (MeasuredMAREINFORCE, MAREINFORCEConfig),
    "iac": (MeasuredIAC, IACConfig),
    "maac": (MeasuredMAAC, MAACConfig),
}


class Measure(TrainerCallback):
    """Collects one record per step of a measured trainer."""

    def __init__(self, trainer: MeasuredMixin, count_reads: bool):
        self.trainer = trainer
        self.count_reads = count_reads  # in the last step
        self.records = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.watch = contextlib.ExitStack()
        self.trainer.is_watched = self.count_reads and state.global_step == args.max_steps - 1
        if self.trainer.is_watched and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        reset_peak()
        self.start = now()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        # DeepSpeed has stepped by now
        start = time.perf_counter()
        self.trainer.watch.close()
        self.held = held()
        self.start += time.perf_counter() - start

    def on_step_end(self, args, state, control, **kwargs):
        seconds, phases = now() - self.start, self.trainer.phases
        phases = {**phases, "update": seconds - sum(phases.values())}
        peaks = {"generate": self.trainer.peak_of_rollouts, "update": peak()}
        self.records.append({"seconds": seconds, "phases": phases, "held": self.held, **peaks})
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


def run(
    folder: Path,
    model: str,
    roles: list[str],
    lora: dict | None,
    steps: int,
    num_items: int,
    num_tokens: int,
    dtype: str,
    bf16: bool,
    gradient_checkpointing: bool,
    micro_batch: int,
    algorithm: str = "magrpo",
    arguments: dict | None = None,
    prompt_tokens: int = 0,
    count_reads: bool = False,
    profiles: bool = False,
    grouped: bool = True,
    graphs: bool = True,
    in_place: bool = False,
) -> dict:
    """
    Takes training steps and measures this process.

    Args:
        folder (`Path`): Where the trainer may write.
        model (`str`): Folder of [`save_model`].
        roles (`list[str]`): The agents.
        lora (`dict`, *optional*): Arguments of [`~peft.LoraConfig`]; without them, full models.
        steps (`int`): Optimizer steps, the first one included.
        num_items (`int`): Items of one step, over all processes.
        num_tokens (`int`): Tokens of every completion.
        dtype (`str`): Data type of the loaded weights.
        bf16 (`bool`): Whether to train in mixed precision.
        gradient_checkpointing (`bool`): Whether activations are computed again in the backward pass.
        micro_batch (`int`): Rows of a forward pass; a row holds one completion of every agent.
        algorithm (`str`): One of `TRAINERS`.
        arguments (`dict`, *optional*): More arguments of its configuration.
        prompt_tokens (`int`, *optional*): Characters that precede every prompt.
        count_reads (`bool`, *optional*): Whether to count reads and launches, in one more step that is not timed.
        profiles (`bool`, *optional*): Whether to profile the update of the last step, too.
        grouped (`bool`, *optional*): Whether agents on one base share a forward of the update.
        graphs (`bool`, *optional*): Whether tokens are sampled with CUDA graphs, on a GPU.
        in_place (`bool`, *optional*): Whether processes on CPUs gather tensors without copies, as those on GPUs do.
    """
    text = ("x = x + 1  # a line of a program\n" * (prompt_tokens // 33 + 1))[:prompt_tokens]
    prompts = {role: f"{text}Task {{x}} of {role}:" for role in roles}
    environment = FunctionEnvironment(prompts, checksum_reward, transition=ask_again)
    trainer_class, config_class = TRAINERS[algorithm]
    common = {
        "output_dir": str(folder),
        "items_per_device": num_items // int(os.environ.get("WORLD_SIZE", 1)),
        "per_device_train_batch_size": micro_batch,
        "max_completion_length": num_tokens,
        "generation_kwargs": {"min_new_tokens": num_tokens},
        "max_steps": steps,
        "learning_rate": 1e-6,
        "bf16": bf16,
        "use_cpu": not torch.cuda.is_available(),  # otherwise several processes would not find each other
        "gradient_checkpointing": gradient_checkpointing,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = config_class(**{**common, **(arguments or {})})
    if args.deepspeed_plugin is not None:
        import deepspeed  # noqa: F401  (with the libraries, before the team)
    if in_place:
        torch.distributed.all_gather_into_tensor = gather_in_place

    gc.collect()
    libraries = 0 if torch.cuda.is_available() else resident_size("VmRSS")
    peft_config = LoraConfig(**lora) if lora is not None else None
    team = AgentTeam.from_pretrained(model, roles, peft_config=peft_config, dtype=dtype)
    trainer = trainer_class(team, environment, args, Dataset.from_dict({"x": list(range(num_items))}))
    measure = Measure(trainer, count_reads)
    trainer.profiles = profiles
    if not grouped:
        team.joinable = {}
    trainer.add_callback(measure)
    trained_parameters = get_model_param_count(team, trainable_only=True)  # also those of critics
    replays = sampling_loop.replays if graphs else lambda device: False
    with (
        warnings.catch_warnings(record=count_reads) as caught,
        unittest.mock.patch.object(sampling_loop, "replays", replays),
    ):
        if count_reads:
            warnings.simplefilter("always")
        trainer.train()

    measured = measure.records[1:-1] if count_reads else measure.records[1:]
    reads = Counter(f"{x.filename}:{x.lineno}" for x in caught or () if "synchroniz" in str(x.message))
    peaks = {"generate": max(x["generate"] for x in measured), "update": max(x["update"] for x in measured)}
    return {
        "device": trainer.accelerator.device.type,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "trained_parameters": trained_parameters,
        "seconds": statistics.median(record["seconds"] for record in measured),
        "phases": {x: statistics.median(record["phases"][x] for record in measured) for x in measured[0]["phases"]},
        "work": trainer.work,
        "reads": dict(reads.most_common()),
        "launches": trainer.launches.number if count_reads else None,
        "profile": slowest(trainer.profile) if profiles else None,
        "held": max(record["held"] for record in measured),
        **{phase: value - libraries for phase, value in peaks.items()},
        "libraries": libraries,
        "records": measure.records,
    }


def slowest(profile: torch.profiler.profile) -> list[tuple[str, int, float]]:
    """The operations that took the most time: name, number and seconds."""
    times = [
        (x.key, x.count, (x.self_device_time_total or x.self_cpu_time_total) / 1e6) for x in profile.key_averages()
    ]
    return sorted(times, key=lambda x: -x[2])[:12]


def gather_in_place(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Gathers as NCCL does. Gloo's own function holds another copy of what it gathers."""
    for rank, part in enumerate(output_tensor.view(-1).chunk(torch.distributed.get_world_size())):
        if rank == torch.distributed.get_rank():
            part.copy_(input_tensor.view(-1))
        work = torch.distributed.broadcast(part, rank, async_op=True)
        work.wait()
    return work if async_op else None


def checksum_reward(completions: list[dict[str, str]], **columns) -> list[float]:
    """Differs between siblings, so that every row is trained on."""
    return [zlib.crc32(repr(x).encode()) / 2**32 for x in enumerate(completions)]


def ask_again(item, history) -> dict[str, str]:
    return {role: f"\nOnce more, {role}:" for role in history[-1].prompts}


def work(turns, roles: list[str]) -> dict[str, int]:
    """
    What a step cannot do without, over all agents: the tokens that differ from others, or in what precedes them; the
    sampled ones among them; and the decoding steps of calls that sample a whole turn.
    """
    completions = [
        [x for node in nodes for x in node.samples[role].completion_ids] for nodes in turns for role in roles
    ]
    sequences = [
        sorted(
            x.prompt_ids + ids
            for nodes in turns
            for node in nodes
            for x in [node.samples[role]]
            for ids in x.completion_ids
        )
        for role in roles
    ]
    pairs = [zip(*pair, strict=False) for x in sequences for pair in itertools.pairwise(x)]
    common = sum(1 for pair in pairs for _ in itertools.takewhile(lambda tokens: tokens[0] == tokens[1], pair))
    return {
        "tokens": sum(len(ids) for x in sequences for ids in x) - common,
        "sampled_tokens": sum(len(ids) for x in completions for ids in x),
        "decoding_steps": sum(max(map(len, x)) for x in completions),
    }


def now() -> float:
    """Seconds. On a GPU, the device has finished what it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def held() -> int:
    """Bytes held on the GPU, or by the tensors that Python can reach."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_size("VmHWM")


def resident_size(which: str) -> int:
    """The resident size of this process, `VmRSS`, or its peak, `VmHWM`, in bytes."""
    # Not getrusage: its maximum begins with the size of the process that started this one
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[which].split()[0]) * 1024


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    result = run(folder, **json.loads(sys.argv[1]))
    (folder / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(result))
    # A process that exits while another one still communicates would abort it
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()

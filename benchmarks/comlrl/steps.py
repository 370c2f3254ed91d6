"""
Side by side with CoMLRL 1.4.3: training steps of both systems on the same work, on this machine's CPU.

    python -m benchmarks.comlrl.steps                          # MAGRPO: about 20 minutes on two cores
    python -m benchmarks.comlrl.steps --algorithms iac maac    # actor-critic
    python -m benchmarks.comlrl.steps --algorithms single      # one agent, beside TRL's GRPOTrainer: what a team costs
    python -m benchmarks.comlrl.steps --size 8M                # a larger model, with random weights; times only
    python -m benchmarks.comlrl.steps --model smollm2          # a real model, one system after the other: 20 minutes
    python -m benchmarks.comlrl.steps --quick                  # fewer steps, one seed: about 4 minutes per algorithm
    python -m benchmarks.comlrl.steps --smoke                  # seconds: whether it runs; its numbers mean nothing

The first call makes an environment for the peer in the cache folder (`TRL_MULTIAGENT_CACHE`), with the library
versions of `constraints.txt`. Each system runs in a process of its own; the two take their steps in turn, so that
noise of the machine hits both. Runs without network access otherwise. A smoke run makes no environment and no model:
it takes steps of a tiny random model, and only this project's where the peer's environment has not been made.

Equal for both: the demo's base model (two full copies, float32), items in the same order, prompts, G, turns, number of
new tokens, sampling at temperature 1 from the whole distribution, early termination off, number of threads, advantages
without division by their standard deviation, and AdamW with torch's defaults, a constant learning rate and no
clipping. In the second turn each agent sees its first prompt and its answer, and then its first prompt once more. In
IAC and MAAC each item is answered once per turn, every critic is a full copy of the base model with the learning rate
of the agents, targets are those of one step, and advantages are standardized over the update.

What is measured:
- a step: from the first item's prompt until the weights of all agents have changed, over 8 items (IAC and MAAC: 32).
  The peer's buffer is as large as all nodes of these items, so that it updates once per step and turn;
- generate, reward: the time inside those phases, with the critics' values in generate; update: all the rest of the
  step, bookkeeping included;
- processor time: that of the process, sandbox helpers not included. Other programs' load touches it less than wall
  time;
- generate calls: calls of `generate` of transformers; optimizer steps: calls of `step` of a torch optimizer;
- peak memory: the largest resident size of the process since its start, libraries included, sandbox helpers not
  (Linux);
- the floor: the processor time of the products with the weights alone in a step of this project, every token of a tree
  that differs from others, or in what precedes it, once; see `floor.py`;
- the profile of this project's step: reading prompts and sampling tokens, which are parts of generate, and forward and
  backward of the update;
- the reward curve: mean joint reward of the sampled joint actions against env steps, at the same learning rate.

The joint reward is `code` (the demo's tests, run in this project's sandbox by both systems; the peer asks for one
joint action at a time, as it does with any reward) or `text` (a formula on the text that takes next to no time and
seldom gives two siblings the same value, so few have zero advantage). Steps are timed at a learning rate of 1e-6,
which leaves both systems sampling from the base model.

With `single`, one agent with the prompts of main answers once, and the peer is TRL's GRPOTrainer with the same loss.

With `--model`, the task is `hidden` of recipes/real: a speaker tells a decider what is in a box. Both systems
play trees of two turns with 16 scored answers for each of two items: full weights in float32, or LoRA of rank 16 on a
base in float32, temperature 0.7, at most 8 tokens. CoMLRL has no LoRA, and all its agents answer in every turn. One
agent alone knows the word, and answers four times for each of eight items, beside TRL's GRPOTrainer. Steps are timed
at a rate of 1e-6, so that all of them sample from the same policy; `--learning_rate` shows what is learned. Peak
memory is that beyond the libraries; beside it stands what `trl-multiagent plan` computes. `--runs` takes some of the
rows; the output file keeps the others.

Differences that remain, all of them the systems' own:
- The peer takes one optimizer step per agent and turn, here one step for the whole team; env steps are what is
  compared.
- The peer leaves the last position of a padded completion out of the loss and trains on the padding after shorter
  completions; here every completion token counts once and padding never.
- Siblings with zero advantage are left out of the update here, since they add nothing to its gradient.
- The peer's IAC and MAAC compute the log-probabilities of the sampled tokens while sampling, and do not use them. Its
  MAAC steps the critic once per agent on the same input, here once.
- A critic's output is scaled here by the mean and the deviation of recent targets.
- The process of this project also holds TRL and accelerate, so it starts larger. With the reward `code` both hold it.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoTokenizer

from benchmarks.comlrl.floor import floor
from benchmarks.comlrl.hidden import ADAPTER, ALONE, SPEAKER, arguments
from benchmarks.comlrl.task import ROLES
from benchmarks.team_run import REPOSITORY, machine, save_model
from trl_multiagent import MAGRPOConfig
from trl_multiagent.configs.recipes.demo.model import demo_model
from trl_multiagent.configs.recipes.demo.problems import demo_dataset, demo_prompts
from trl_multiagent.configs.recipes.real.hidden import draw
from trl_multiagent.configs.recipes.real.words import TRAINING
from trl_multiagent.folders import cache_folder
from trl_multiagent.models.gguf import converted
from trl_multiagent.models.packaged import smollm2
from trl_multiagent.models.pretrained import without_weights
from trl_multiagent.rollout.history import tokenize_prompts
from trl_multiagent.trainers.base.memory import Size, memory_parts


PEER = "comlrl==1.4.3"
LABELS = {"peer": "CoMLRL", "trl": "TRL"}  # of the systems that this one stands beside
PHASES = ("step", "generate", "reward", "update")
PROFILE = ("prompts", "tokens", "forward", "backward")  # parts of this project's generate and update
CLOCKS = ("seconds", "cpu_seconds")
COUNTS = ("generate_calls", "optimizer_steps", "env_steps", "peak_memory_mb")
COMMON = {"max_new_tokens": 40, "rows_per_forward": 8}
SIBLINGS = {"items_per_step": 8, "num_generations": 4, "advantage_normalization": False}
CRITICS = {"items_per_step": 32, "num_generations": 1, "advantage_normalization": True}
ALGORITHMS = {"magrpo": SIBLINGS, "single": SIBLINGS, "iac": CRITICS, "maac": CRITICS}
# What a step has to be faster by, per number of turns
TARGETS = {"magrpo": {1: 4.0, 2: 4.5}, "single": {1: 2.5}, "iac": {1: 3.0, 2: 3.0}, "maac": {1: 3.0, 2: 3.0}}
# Hidden size and layers of random models
SIZES = {"8M": (256, 10)}
CURVE_LEARNING_RATE = 5e-4
# With a real model: the system, the number of agents, whether they are LoRA adapters
RUNS = {"CoMLRL, full": ("peer", 2, False), "ours, full": ("ours", 2, False), "ours, LoRA": ("ours", 2, True)}
RUNS |= {"TRL, one agent, full": ("trl", 1, False), "ours, one agent, full": ("ours", 1, False)}
RUNS |= {"TRL, one agent, LoRA": ("trl", 1, True), "ours, one agent, LoRA": ("ours", 1, True)}
RUNS |= {f"{name}, bf16": RUNS[name] for name in ("ours, full", "ours, one agent, full")}
REAL = {"num_generations": 4, "max_new_tokens": 8, "rows_per_forward": 8, "temperature": 0.7}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--quick", action="store_true", help="fewer steps and one seed")
    parser.add_argument("--smoke", action="store_true", help="seconds: two steps of a tiny model")
    parser.add_argument(
        "--algorithms", nargs="+", choices=tuple(ALGORITHMS), default=["magrpo"], help="default: magrpo"
    )
    parser.add_argument("--size", choices=("demo", *SIZES), default="demo", help="default: the demo's model")
    parser.add_argument("--model", help="smollm2, or a folder or GGUF file: a real model instead, on the task hidden")
    parser.add_argument(
        "--runs", nargs="+", choices=RUNS, default=[*RUNS], help="with --model: the rows (default: all)"
    )
    parser.add_argument("--learning_rate", type=float, default=1e-6, help="with --model (default: 1e-6)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each system (default: 1)")
    parser.add_argument("--steps", type=int, help="timed steps per setting (default: 8, quick: 3, 0: no times)")
    parser.add_argument("--seeds", type=int, help="seeds of the reward curve (default: 3, quick: 1, 0: no curve)")
    parser.add_argument(
        "--first_seed", type=int, default=0, help="the first of them; with --model, the only one (default: 0)"
    )
    parser.add_argument("--output", type=Path, default=Path("comlrl.json"), help="where the JSON goes")
    options = parser.parse_args()
    if options.model:
        return real_model(options)
    defaults = (3, 1, 16) if options.quick else (8, 3, 40)
    timed_steps = options.steps if options.steps is not None else defaults[0]
    seeds = options.seeds if options.seeds is not None else defaults[1]
    curve_steps = defaults[2]
    common, cases = COMMON, list(itertools.product((1, 2), ("code", "text")))
    algorithms = {name: {"algorithm": name, "roles": ROLES, **ALGORITHMS[name]} for name in options.algorithms}
    if options.size != "demo":  # whose random answers solve no problem
        common, cases, seeds = {**COMMON, "max_new_tokens": 16}, [(1, "text"), (2, "text")], 0
        algorithms = {name: {**algorithm, "items_per_step": 4} for name, algorithm in algorithms.items()}
    if options.smoke:
        common, cases, timed_steps, seeds = {**COMMON, "max_new_tokens": 4}, [(2, "code")], 2, 0
        # The others run as these do
        algorithms = {name: {"algorithm": name, "roles": ROLES, **ALGORITHMS[name]} for name in ("single", "maac")}
        algorithms = {name: {**algorithm, "items_per_step": 2} for name, algorithm in algorithms.items()}

    pythons = {"ours": sys.executable}
    if set(algorithms) != {"single"}:
        pythons["peer"] = peer_python(make=not options.smoke)
        if pythons["peer"] is None:
            del pythons["peer"]
            print(
                f"{PEER} is not installed here, and a smoke run installs nothing: these are this project's steps "
                "alone."
            )
    beside = dict.fromkeys(algorithms, pythons) | {"single": {"ours": sys.executable, "trl": sys.executable}}
    if "single" in algorithms:
        algorithms["single"]["roles"] = ROLES[1:]
    results = {
        "machine": machine(),
        "settings": {**common, "threads": options.threads, "size": options.size, "algorithms": algorithms},
        "times": [],
        "curves": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        model = folder
        if options.smoke or options.size != "demo":
            hidden_size, num_layers = (64, 1) if options.smoke else SIZES[options.size]
            save_model(Path(folder), hidden_size, num_layers)
        else:
            model = demo_model()
        common = {**common, "threads": options.threads, "model": model}
        for name, algorithm in algorithms.items():
            size, systems = algorithm["items_per_step"], beside[name]
            for num_turns, reward in ([(1, "text")] if name == "single" else cases) if timed_steps else ():
                settings = {
                    **common,
                    **algorithm,
                    "num_turns": num_turns,
                    "reward": reward,
                    "learning_rate": 1e-6,
                    "seed": 0,
                    "items": items((timed_steps + 1) * size, seed=0),
                }
                records = run(systems, settings, f"{name}, T = {num_turns}, reward {reward}")
                times = {**algorithm, "num_turns": num_turns, "reward": reward, "load": os.getloadavg()}
                results["times"].append({**times, **compare(records)})
                if name in ("magrpo", "single"):  # no critics
                    results["times"][-1]["floor"] = floor(model, records["ours"][-1]["work"], options.threads)
                print_times(results["times"][-1])
            curves = [records] if options.smoke else []  # another start of the systems would take as long again
            for seed in range(options.first_seed, options.first_seed + seeds) if name != "single" else ():
                settings = {
                    **common,
                    **algorithm,
                    "num_turns": 1,
                    "reward": "code",
                    "learning_rate": CURVE_LEARNING_RATE,
                    "seed": seed,
                    "items": items(curve_steps * size, seed),
                }
                curves.append(run(systems, settings, f"{name}, reward curve, seed {seed}"))
            if curves:
                results["curves"].append(compare_curves(curves, settings))
                print_curve(results["curves"][-1])
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nAll numbers: {options.output}")


def real_model(options: argparse.Namespace) -> None:
    """Runs `hidden` with a real model in one system after the other. Prints all rows of the output file."""
    if options.model != "smollm2" and not Path(options.model).exists():
        raise SystemExit(f"--model: there is no folder or GGUF file {options.model}.")
    model = smollm2() if options.model == "smollm2" else converted(options.model)
    steps = options.steps or 6
    rows = json.loads(options.output.read_text()) if options.output.is_file() else {}
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(4 << 20)  # larger pieces go back to the system when they are freed
    for name in options.runs:
        system, agents, lora = RUNS[name]
        size = 2 if agents == 2 else 8
        settings = {**REAL, "model": model, "agents": agents, "lora": lora, "bf16": "bf16" in name}
        settings |= {"learning_rate": options.learning_rate, "items_per_step": size, "threads": options.threads}
        settings["seed"] = options.first_seed
        settings["items"] = draw(TRAINING, (steps + 1) * size, seed=0)
        python = peer_python(make=True) if system == "peer" else sys.executable
        records = run({f"hidden_{system}": python}, settings, name)[f"hidden_{system}"]
        peak = (records[-1]["peak_memory_mb"] - records[-1]["work"]["libraries_mb"]) * 2**20 / 1e9
        times = {phase: statistics.median(x["cpu_seconds"][phase] for x in records[1:]) for phase in PHASES}
        rows[name] = {"cpu_seconds": times, "peak_gb": peak, "rewards": [x["reward"] for x in records]}
        rows[name]["steps"] = [x["cpu_seconds"]["step"] for x in records]
        rows[name] |= {"planned_gb": planned(settings) / 1e9} if system == "ours" else {}
        options.output.write_text(json.dumps(rows, indent=2) + "\n")
    print("| | step, CPU s | generate | update | peak, GB | plan, GB | reward of each step |\n|" + " --- |" * 7)
    for name, row in rows.items():
        cells = [f"{row['cpu_seconds'][phase]:.1f}" for phase in ("step", "generate", "update")]
        cells += [f"{row['peak_gb']:.2f}", f"{row['planned_gb']:.2f}" if "planned_gb" in row else ""]
        print(f"| {name} | {' | '.join(cells)} | {' '.join(f'{x:.2f}' for x in row['rewards'])} |")


def planned(settings: dict) -> float:
    """The peak of memory that the plan of a run computes, in bytes."""
    config, agents = AutoConfig.from_pretrained(settings["model"]), settings["agents"]
    own, base = (model := without_weights(config)).num_parameters(), 0
    if settings["lora"]:
        with torch.device("meta"):
            own, base = get_peft_model(model, LoraConfig(**ADAPTER)).get_nb_trainable_parameters()[0], own
    question = SPEAKER if agents == 2 else ALONE
    asked = [[{"role": "user", "content": question.format(**item)}] for item in settings["items"]]
    prompts = tokenize_prompts(AutoTokenizer.from_pretrained(settings["model"]), asked)
    columns = zip(*prompts, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda tokens: len({*tokens}) == 1, columns))
    size = Size(agents * own, 0, base, 4.0, own + base, config, max(map(len, prompts)), common, agents, acting=1)
    given = {"items_per_device": settings["items_per_step"], "num_turns": agents}
    parts = memory_parts(MAGRPOConfig("plan", **given, **arguments(settings)), size, stage=0, processes=1)
    sums = {phase: sum(numbers.values()) for phase, numbers in parts.items()}
    return sums["held"] + max(sums["sampling"], sums["update"])


def peer_python(make: bool) -> str | None:
    """The Python of the peer's environment; if it is not there, it is made, or there is none."""
    folder = cache_folder() / f"{PEER.replace('==', '-')}-python{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if not complete.is_file():
        if not make:
            return None
        print(f"Making an environment for {PEER} in {folder} ...", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = REPOSITORY / "constraints.txt"
        torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
        subprocess.run([*install, torch], check=True)
        # This project too: its sandbox gives the peer the same reward
        subprocess.run([*install, "-c", constraints, PEER, "-e", REPOSITORY], check=True)
        complete.touch()
    return str(python)


def items(number: int, seed: int) -> list[dict]:
    """
    The items of a run, in order, with their prompts. A run that needs more than there are sees them again in another
    order.
    """
    train, rows = demo_dataset("train"), []
    while len(rows) < number:
        rows += train.shuffle(seed + 1000 * (len(rows) // len(train))).to_list()
    rows = rows[:number]
    return [{**row, **{f"{role}_prompt": text for role, text in demo_prompts(row).items()}} for row in rows]


def run(pythons: dict[str, str], settings: dict, title: str) -> dict[str, list[dict]]:
    """Lets the systems take their steps in turn, and returns each system's records of them."""
    steps = len(settings["items"]) // settings["items_per_step"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps(settings))
        systems = {name: System(name, python, path, settings["threads"]) for name, python in pythons.items()}
        try:
            for system in systems.values():
                system.read()  # it is ready
            records = {name: [] for name in systems}
            for step in tqdm(range(steps), desc=title, unit="step"):
                for name in systems if step % 2 == 0 else reversed(systems):
                    records[name].append(systems[name].step())
        finally:
            for system in systems.values():
                system.close()
    return records


class System:
    """One system in a process of its own."""

    def __init__(self, name: str, python: str, settings: Path, threads: int):
        self.name = name
        self.log = settings.with_name(f"{name}.log")
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "WANDB_MODE": "disabled",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": str(threads),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, "-m", f"benchmarks.comlrl.{name}", settings],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=REPOSITORY,
            )

    def step(self) -> dict:
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"The process of {self.name!r} ended. Its last words:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def compare(records: dict[str, list[dict]]) -> dict:
    """Medians over the steps after the first, which warms up, and the ratios of the other system to this one."""
    result = {}
    for name, steps in records.items():
        last = steps[-1]
        result[name] = {
            clock: {phase: statistics.median(step[clock][phase] for step in steps[1:]) for phase in PHASES}
            for clock in CLOCKS
        }
        result[name]["profile"] = {
            part: statistics.median(step["cpu_seconds"][part] for step in steps[1:])
            for part in PROFILE
            if part in last["cpu_seconds"]
        }
        for key in COUNTS:
            result[name][key] = last[key]
        result[name]["steps"] = steps
    for clock, other in itertools.product(CLOCKS, LABELS.keys() & result.keys()):
        result[f"ratio_{clock}"] = {
            phase: result[other][clock][phase] / result["ours"][clock][phase] for phase in PHASES
        }
    return result


def compare_curves(curves: list[dict[str, list[dict]]], settings: dict, points: int = 8) -> dict:
    """
    Mean reward of each system in consecutive stretches of env steps, over all seeds.

    Returns:
        `dict` with `"env_steps"` (the end of each stretch), per system `"reward"` (mean over seeds) and `"by_seed"`,
        and where the peer took part the difference ours - peer of the mean reward over the whole run with its standard
        error over seeds.
    """
    steps = len(curves[0]["ours"])
    points = min(points, steps)
    ends = [round(steps * k / points) for k in range(1, points + 1)]
    result = {name: settings[name] for name in ("algorithm", "num_turns", "learning_rate")}
    result["env_steps"] = [sum(step["env_steps"] for step in curves[0]["ours"][:end]) for end in ends]
    for name in curves[0]:
        by_seed = [
            [
                statistics.mean(step["reward"] for step in curve[name][start:end])
                for start, end in zip([0, *ends], ends, strict=False)
            ]
            for curve in curves
        ]
        result[name] = {
            "reward": [statistics.mean(column) for column in zip(*by_seed, strict=True)],
            "by_seed": by_seed,
        }
    if "peer" not in result:
        return result
    differences = [
        statistics.mean(ours) - statistics.mean(peer)
        for ours, peer in zip(result["ours"]["by_seed"], result["peer"]["by_seed"], strict=True)
    ]
    spread = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
    result["difference"] = {"mean": statistics.mean(differences), "standard_error": spread, "by_seed": differences}
    return result


def print_times(times: dict) -> None:
    ours, other = times["ours"], next((name for name in LABELS if name in times), "peer")
    peer, label = times.get(other), LABELS[other]
    print(
        f"\n{times['algorithm']}: {times['items_per_step']} items, G = {times['num_generations']}, T = "
        f"{times['num_turns']}, "
        f"reward {times['reward']}, load of the machine {times['load'][0]:.1f}"
    )
    print(f"{'':18}{'------ wall, s ------':>27}{'---- processor, s ----':>29}")
    print(f"{'':18}{label:>9}{'ours':>9}{'ratio':>9}{label:>11}{'ours':>9}{'ratio':>9}")
    for phase in PHASES:
        cells = [f"{phase:18}"]
        for clock, width in zip(CLOCKS, (9, 11), strict=True):
            cells.append(f"{peer[clock][phase]:{width}.3f}" if peer else f"{'-':>{width}}")
            cells.append(f"{ours[clock][phase]:9.3f}")
            cells.append(f"{times[f'ratio_{clock}'][phase]:8.1f}x" if peer else f"{'-':>9}")
        print(
            "".join(cells)
            + (f"   target {TARGETS[times['algorithm']][times['num_turns']]:g}x" if phase == "step" else "")
        )
    if "floor" in times:
        of_step = times["floor"]["step"] / ours["cpu_seconds"]["step"]
        print(f"{'floor':18}{'':38}{times['floor']['step']:9.3f}   {of_step:.0%} of our step")
    parts = [f"{part} {seconds:.3f}" for part, seconds in ours["profile"].items()]
    if "floor" in times:
        parts += [f"floor of {phase} {times['floor'][phase]:.3f}" for phase in ("generate", "update")]
    print("profile of ours, processor s: " + ", ".join(parts))
    for key in COUNTS:
        print(f"{key.replace('_', ' '):18}" + (f"{peer[key]:9.0f}" if peer else f"{'-':>9}") + f"{ours[key]:9.0f}")
    sys.stdout.flush()


def print_curve(curve: dict) -> None:
    setting = f"{curve['algorithm']}, T = {curve['num_turns']}, learning rate {curve['learning_rate']:g}"
    print(f"\nMean joint reward against env steps, {setting}")
    print("env steps up to " + "".join(f"{end:7}" for end in curve["env_steps"]))
    for label, name in (("CoMLRL", "peer"), ("ours", "ours")) if "peer" in curve else (("ours", "ours"),):
        print(f"{label:16}" + "".join(f"{value:7.2f}" for value in curve[name]["reward"]))
    if "peer" not in curve:
        return
    difference = curve["difference"]
    error = "" if difference["standard_error"] is None else f" +- {difference['standard_error']:.2f} (standard error)"
    print(f"ours - CoMLRL over the whole run: {difference['mean']:+.2f}{error}, {len(difference['by_seed'])} seeds")


if __name__ == "__main__":
    main()

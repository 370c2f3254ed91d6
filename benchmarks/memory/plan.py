"""
Compares the memory that `trl-multiagent plan` computes with what training steps need.

    python -m benchmarks.memory.plan            # about 10 minutes on two cores
    python -m benchmarks.memory.plan --forms lora
    python -m benchmarks.memory.plan --smoke    # seconds: whether it runs; its numbers mean nothing

Each team takes three steps of MAGRPO with a random Llama of bytes, in fresh processes; `team_run.py` says what is
measured and how. `iac` is LoRA with an adapter for the critic of each agent, prompts of 400 tokens, and activations
that are kept. The peak of a process on a CPU has parts that do not depend on the size of a model, such as what
libraries load when they are first used. They are what the same steps of a tiny team with as many layers need beyond
its plan: `fixed`. The printed peaks are without them.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.team_run import LAUNCHES, MIB, launch, run_here, save_model
from trl_multiagent import IACConfig, MAGRPOConfig
from trl_multiagent.trainers.base.memory import Size, memory_parts


LORA = {"r": 8, "target_modules": "all-linear"}
STAGES = {"one process": 0, "DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}
# The form of the team, how it is launched, and whether it computes in bfloat16
RUNS = [("full", name, bf16) for name in STAGES for bf16 in (False, True)]
RUNS += [("lora", "one process", False), ("lora", "one process", True), ("lora", "ZeRO-3", True)]
RUNS += [("iac", "one process", False), ("iac", "one process", True)]
FORMS = ["full", "lora", "iac"]
PROMPT = 20  # tokens of a prompt after its `prompt_tokens`
CRITICS = {"algorithm": "iac", "arguments": {"critic_form": "adapter"}, "prompt_tokens": 400}
CRITICS |= {"gradient_checkpointing": False, "micro_batch": 4, "num_items": 4}


def planned(folder: Path, form: str, name: str, settings: dict) -> dict[str, float]:
    """Returns what the plan says, in bytes."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        number, agents = model.num_parameters(), len(settings["roles"])
        adapter = get_peft_model(model, LoraConfig(**LORA)).get_nb_trainable_parameters()[0] if form != "full" else 0
    config_class = IACConfig if form == "iac" else MAGRPOConfig
    args = config_class(
        "plan",
        items_per_device=settings["num_items"] // LAUNCHES[name][1],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_checkpointing=settings["gradient_checkpointing"],
        max_completion_length=settings["num_tokens"],
        bf16=settings["bf16"],
        use_cpu=True,
        report_to="none",
        **settings.get("arguments", {}),
    )
    trained, base = (agents * adapter, number) if adapter else (agents * number, 0)
    own = {"joint": agents, "adapters": trained} if base else {}
    own |= {"critics": agents if form == "iac" else 0, "prompt": settings.get("prompt_tokens", 0) + PROMPT}
    own["common"] = settings.get("prompt_tokens", 0)
    trained += own["critics"] * adapter  # those of critics have the same rank
    size = Size(trained, 0, base, 4.0, number, config, agents=agents, acting=agents, **own)
    parts = memory_parts(args, size, STAGES[name], LAUNCHES[name][1])
    sums = {phase: sum(numbers.values()) for phase, numbers in parts.items()}
    return {"generate": sums["held"] + sums["sampling"], "update": sums["held"] + sums["update"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--smoke", action="store_true", help="seconds: a tiny model in this process")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--output", type=Path, default=Path("memory_plan.json"), help="where the JSON goes")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model, tiny = Path(folder) / "model", Path(folder) / "tiny"
        save_model(model, *((64, 1) if options.smoke else (1024, 6)))
        save_model(tiny, 64, 1 if options.smoke else 6)
        settings = {"roles": ["aux", "main"], "steps": 3, "num_tokens": 8, "dtype": "float32"}
        settings |= {"gradient_checkpointing": True, "micro_batch": 2, "in_place": not options.smoke}
        print(
            "MiB".ljust(28)
            + "".join(f"{x:>10}" for x in ["generate", "planned", "fixed", "update", "planned", "fixed"])
        )
        for form, name, bf16 in RUNS[:1] if options.smoke else [run for run in RUNS if run[0] in options.forms]:
            run = {**settings, "lora": None if form == "full" else LORA, "bf16": bf16, "num_items": LAUNCHES[name][1]}
            run |= CRITICS if form == "iac" else {}
            fixed = {"generate": 0.0, "update": 0.0}
            for folder_of in (tiny, model):
                run["model"], plan = str(folder_of), planned(folder_of, form, name, run)
                measured = run_here(run) if options.smoke else launch(name, run, False, 1, 600)
                peaks = {phase: max(record[phase] for record in measured) - fixed[phase] for phase in plan}
                if folder_of == tiny:
                    fixed = {phase: peaks[phase] - plan[phase] for phase in plan}
            numbers = {"measured": peaks, "planned": plan, "fixed": fixed}
            results.append({"form": form, "launch": name, "bf16": bf16, **numbers})
            cells = "".join(f"{x[phase] / MIB:10.1f}" for phase in plan for x in (peaks, plan, fixed))
            print(f"{form}, {name}{', bf16' * bf16:<6}".ljust(28) + cells, flush=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

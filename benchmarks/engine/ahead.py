"""
A step with `rollouts_ahead`, whose tool waits as long as an update takes, over one after the other: wall-clock time.

    python -m benchmarks.engine.ahead            # two minutes on one core
    python -m benchmarks.engine.ahead --smoke    # seconds: whether it runs; its numbers mean nothing

Two LoRA agents on a random base answer one after the other, and a tool waits between them. Both runs take the same
steps. The first step, which samples for itself, and the last one, which samples nothing ahead, do not count.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

from datasets import Dataset
from tokenizers.pre_tokenizers import WhitespaceSplit

from benchmarks.engine.grouped import SMALL, make_team
from trl_multiagent import MAGRPOConfig, MAGRPOTrainer, workflow


SIZE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 4096}
PHASES = ("generate", "reward", "update")


def seconds_of(size: dict, wait: float, ahead: int, steps: int, tokens: int, items: int) -> dict[str, float]:
    """Returns the median seconds of a step, by phase."""

    @workflow(roles=("agent_0", "agent_1"), max_turns=2)
    async def task(item, agents):
        words = await agents.agent_0(item["prompt"])
        await asyncio.sleep(wait)
        return sum((words + await agents.agent_1(item["prompt"])).encode()) % 10  # else equal rewards need no update

    prompts = [" ".join(f"w{(7 * k + n) % 200 + 1}" for n in range(300)) for k in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        args = MAGRPOConfig(
            folder,
            **{"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
            **{"rollouts_ahead": ahead, "max_steps": steps, "logging_steps": 1, "learning_rate": 1e-5},
            **{
                "branching": "episodes",
                "num_generations": 8,
                "items_per_device": items,
                "max_completion_length": tokens,
            },
            per_device_train_batch_size=4,
        )
        team = make_team(2, size)
        team.tokenizers["agent_0"].backend_tokenizer.pre_tokenizer = WhitespaceSplit()
        trainer = MAGRPOTrainer(team, task, args, Dataset.from_dict({"prompt": prompts}))
        trainer.train()
    logs = [x for x in trainer.state.log_history if "time/update" in x][1:-1]
    return {name: statistics.median(x[f"time/{name}"] for x in logs) for name in PHASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small models and few steps")
    parser.add_argument("--output", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    size, *shape = (SMALL, 3, 4, 1) if args.smoke else (SIZE, 5, 8, 8)
    wait = seconds_of(size, 0.0, 0, *shape)["update"]
    rows = {name: seconds_of(size, wait, ahead, *shape) for ahead, name in enumerate(("one after the other", "ahead"))}
    print("a step, seconds      | " + " | ".join(PHASES) + " | sum")
    for name, row in rows.items():
        print(f"{name:20} | " + " | ".join(f"{row[phase]:.2f}" for phase in PHASES) + f" | {sum(row.values()):.2f}")
    plain, ahead = (sum(row.values()) for row in rows.values())
    print(f"ahead, over the sum  | {ahead / plain:.2f}")
    if args.output:
        args.output.write_text(json.dumps({"wait": wait, "ratio": ahead / plain, **rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

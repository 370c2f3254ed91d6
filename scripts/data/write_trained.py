"""
Writes the adapters that `make demo-code` shows, in bfloat16 and without what their base has, too.

    python -m benchmarks.learning.coder small_rank_1 --arguments max_steps=10 --folder runs   # trains them
    python scripts/data/write_trained.py runs/small_rank_1/run
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from trl_multiagent.configs.recipes.code_generation.demo import HUB, TRAINED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("run", type=Path, help="folder of the run")
    options = parser.parse_args()
    shutil.copy(options.run / "team.json", TRAINED)
    for agent in (options.run / "agents").iterdir():
        folder = TRAINED / "agents" / agent.name
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((agent / "adapter_config.json").read_text()) | {"base_model_name_or_path": HUB}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        weights = {name: x.to(torch.bfloat16) for name, x in load_file(agent / "adapter_model.safetensors").items()}
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()

"""
Runs of MADPO and MARLHF, in rounds or not, under any launcher: `preference_runs.py FOLDER MODEL PAIRS_PER_DEVICE
ALGORITHM`.
"""

import sys

import torch

from trl_multiagent.runs.run import run_recipe

from process_group import end_process_group
from tiny import tiny_task


TASK = tiny_task(4)
ARGUMENTS = "--preference_num_candidates 4 --max_completion_length 6 --disable_tqdm --report_to none "
ARGUMENTS += "--items_per_chunk 1 --logging_steps 1 --save_strategy no --optim sgd --learning_rate 0.1 --max_steps 2 "
ARGUMENTS += "--bf16 false"
MARLHF = "--items_per_device 2 --num_generations 2 --reward_learning_rate 0.1 --reward_eval_fraction 0"


def run(folder: str, model: str, pairs: str, algorithm: str, *more: str):
    argv = ["--model_name", model, "--output_dir", folder, *ARGUMENTS.split()]
    if algorithm.startswith("madpo"):
        run_recipe(algorithm, TASK, [*argv, "--per_device_train_batch_size", pairs, *more], "run")
        return
    reward_model = [f"{algorithm}.reward_training={{optim: sgd, bf16: false}}", f"{algorithm}.reward_peft={{r: 2}}"]
    argv += [*MARLHF.split(), "--reward_train_batch_size", pairs, "--override", *reward_model, *more]
    run_recipe(algorithm, TASK, argv, "run")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(*sys.argv[1:])
    end_process_group()

"""
Two nodes of one process each, without a common folder. Run by `test_checkpoints.py`: `own_folders.py FOLDER`.
"""

import os
import sys
from functools import partial
from pathlib import Path


os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

from trl_multiagent import IACConfig, IACTrainer

from process_group import end_process_group
from tiny import EVALUATED, SAVED, tiny_items, tiny_trainer


if __name__ == "__main__":
    folder = Path(sys.argv[1]) / os.environ["RANK"]
    critics = {"trainer": IACTrainer, "config": IACConfig}
    make = partial(tiny_trainer, folder, **critics, **SAVED, save_on_each_node=True)
    best = {**EVALUATED, "eval_dataset": tiny_items(2), "metric_for_best_model": "reward"}
    make(max_steps=2, load_best_model_at_end=True, **best).train()
    trainer = make(max_steps=3)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert trainer.state.global_step == 3
    end_process_group()

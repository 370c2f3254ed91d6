"""Takes out of libraries what they do again and again in the tests' many short runs, and what no test could see."""

import functools
import gc
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import accelerate.utils.other
import jinja2
import torch


def make_libraries_quick() -> None:
    torch.set_num_threads(1)  # the models here are too small to share
    # accelerate reads whole files of metadata, several times a step, to find out which packages are installed
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    # TRL compiles the template of a model card with each one. accelerate looks through all modules, at every generation, for compiled ones
    jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)
    accelerate.utils.other.has_compiled_regions = lambda module: False
    # Every training ends with a full collection, although Python collects by itself. What is imported by now is never looked at
    collect = gc.collect
    gc.collect = lambda generation=2: collect(0)
    gc.freeze()
    os.fsync = lambda file: None  # a process that is killed leaves what it wrote; only a machine that fails does not
    if not torch.cuda.is_available():
        # Of a device that is not there, torch keeps every seed with the stack of its caller
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None
    hub = sys.modules.get("trl_multiagent.trainers.base.hub")
    if hub is not None:  # every checkpoint has a picture, which takes as long to draw as a step
        hub.draw_reward_curve = no_picture


def no_picture(series: Mapping, path: Path) -> None:
    """Stands in for the reward curve, which `test_model_card.py` and the runs of `test_hub.py` draw."""
    path.touch()

"""Takes out of libraries what they do again and again in the tests' many short runs, and what no test could see."""

import functools
import gc
import importlib.metadata
import os

import accelerate.utils.other
import jinja2
import torch
from transformers import GenerationConfig, PreTrainedConfig

from trl_multiagent.configs.recipes.demo import problems as demo_problems
from trl_multiagent.report.run_report import RunReport


def make_libraries_quick() -> None:
    torch.set_num_threads(1)  # the models here are too small to share
    # accelerate reads whole files of metadata, several times a step, to find out which packages are installed
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    # Reports and model cards have the versions of seven packages, each of which is looked for in all folders
    importlib.metadata.distribution = functools.cache(importlib.metadata.distribution)
    version = importlib.metadata.Distribution.version.fget
    importlib.metadata.Distribution.version = property(functools.cache(version))
    # transformers writes every configuration as text, for a log that is not shown, and looks for layers that differ
    PreTrainedConfig.__repr__ = GenerationConfig.__repr__ = object.__repr__
    PreTrainedConfig.__getattribute__ = attribute_of_configuration
    # TRL compiles the template of a model card with each one. accelerate looks through all modules, at every
    # generation, for compiled ones
    jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)
    accelerate.utils.other.has_compiled_regions = lambda module: False
    # torch goes through the modules of a model with a generator per module, several times a step
    torch.nn.Module.named_modules, torch.nn.Module.train = named_modules, train
    # Every training ends with a full collection, although Python collects by itself. What is imported by now is never
    # looked at
    collect = gc.collect
    gc.collect = lambda generation=2: collect(0)
    gc.freeze()
    os.fsync = lambda file: None  # a process that is killed leaves what it wrote; only a machine that fails does not
    if not torch.cuda.is_available():
        # Of a device that is not there, torch keeps every seed with the stack of its caller
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None
    # Every training ends with a page, which takes as long
    RunReport.drawn, RunReport.refresh = RunReport.refresh, no_page
    # Every start makes the problems of the demo
    demo_problems.demo_rows = functools.cache(demo_problems.demo_rows)
    demo_problems.demo_dataset = functools.cache(demo_problems.demo_dataset)


READ_ATTRIBUTE = PreTrainedConfig.__getattribute__


def attribute_of_configuration(self, name, own=object.__getattribute__):
    if own(self, "__dict__").get("_heterogeneity_spec") is not None:
        return READ_ATTRIBUTE(self, name)
    return own(self, own(self, "attribute_map").get(name, name))


def named_modules(self, memo=None, prefix="", remove_duplicate=True):
    memo = set() if memo is None else memo
    pending = [(prefix, self)]
    while pending:
        name, module = pending.pop()
        if module in memo:
            continue
        if remove_duplicate:
            memo.add(module)
        yield name, module
        start = f"{name}." if name else ""
        pending += [(start + key, child) for key, child in reversed(module._modules.items()) if child is not None]


def train(self, mode=True):
    self.__dict__["training"] = mode
    for child in self._modules.values():
        if child is not None:
            child.train(mode)
    return self


def no_page(*_, **__) -> None:
    """Stands in for the refresh of a run's report, which tests with the fixture `reports` write."""

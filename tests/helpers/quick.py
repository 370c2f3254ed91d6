"""Takes out of libraries what they do again and again in the tests' many short runs, and what no test could see."""

import contextlib
import functools
import gc
import importlib.metadata
import io
import json
import os
import ssl
import subprocess
import sys
import uuid

import accelerate.utils.other
import datasets.arrow_dataset
import jinja2
import pydantic
import torch
from transformers import GenerationConfig, PreTrainedConfig

from trl_multiagent import limits
from trl_multiagent.code.sandbox import sandbox
from trl_multiagent.configs.recipes.demo import problems as demo_problems
from trl_multiagent.report.run_report import RunReport
from trl_multiagent.tasks.code_generation import data as code_data


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
    # Every client of an endpoint reads all certificates of the machine
    ssl.SSLContext.load_verify_locations = load_verify_locations
    # Every training ends with a page, which takes as long
    RunReport.drawn, RunReport.refresh = RunReport.refresh, no_page
    # datasets computes a checksum of every table, for caches of what is made of it. These tables are in memory
    datasets.arrow_dataset.generate_fingerprint = lambda dataset: uuid.uuid4().hex[:16]
    # Every start asks a new process what protects programs on this machine
    sandbox.Sandbox._start = start_helper
    # Every start builds what checks settings, one by one, and reads the benchmarks, to tell what is wrong with a row
    limits.get_type_hints = functools.cache(limits.get_type_hints)
    limits._constrained, limits.TypeAdapter = constrained, adapter
    code_data.unusable_test = functools.cache(code_data.unusable_test)
    code_data.mbpp_row = mbpp_row
    # Every start makes the problems of the demo
    demo_problems.demo_rows = functools.cache(demo_problems.demo_rows)
    demo_problems.demo_dataset = functools.cache(demo_problems.demo_dataset)


CONSTRAINED, KINDS, ADAPTERS = limits._constrained, {}, {}
MBPP_ROW, MADE_ROWS = code_data.mbpp_row, {}
START, PROBED = sandbox.Sandbox._start, {}


class Probe(contextlib.nullcontext):
    """A process that has ended with an output."""

    returncode = 0

    def __init__(self, output: bytes):
        super().__init__(self)
        self.stdout = io.BytesIO(output)


def start_helper(self, attempts, start, *arguments):
    if arguments[:1] != ("kernel",):
        return START(self, attempts, start, *arguments)
    key = start, sys.executable, subprocess.Popen  # which tests replace
    if key not in PROBED:
        with START(self, attempts, start, *arguments) as probe:
            output = probe.stdout.read()
        if probe.returncode != 0:
            return START(self, attempts, start, *arguments)
        PROBED[key] = output
    return Probe(PROBED[key])


def load_verify_locations(self, *args, **kwargs):
    if "SSL_CERT_FILE" in os.environ:  # those of a test
        super(ssl.SSLContext, self).load_verify_locations(*args, **kwargs)


def constrained(hint, limits):
    kinds = KINDS.setdefault((repr(hint), repr(limits)), [])
    known = [kind for known, kind in kinds if known == hint]
    if not known:
        known = [CONSTRAINED(hint, limits)]
        kinds.append((hint, known[0]))
    return known[0]


def adapter(kind, config):
    if id(kind) not in ADAPTERS:
        ADAPTERS[id(kind)] = kind, pydantic.TypeAdapter(kind, config=config)  # the kind stays, and so does its id
    return ADAPTERS[id(kind)][1]


def mbpp_row(row, where):
    try:
        key = json.dumps(row), where
    except TypeError:
        return MBPP_ROW(row, where)
    if key not in MADE_ROWS:
        MADE_ROWS[key] = MBPP_ROW(row, where)
    return {**MADE_ROWS[key]}


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

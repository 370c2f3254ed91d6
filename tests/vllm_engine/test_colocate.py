"""vLLM's engine in the process of the trainer."""

import os
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from trl_multiagent.trainers.base.vllm import LAUNCH_VARIABLES, make_generations, sample_turn

from cpu_vllm import ONLY_ABC, TRAINING, check_stop_strings, make_team, train
from tiny import SAVED, tiny_config


@pytest.mark.parametrize("form", ["full", "shared", "lora", "frozen"])
def test_engines_sample_with_the_weights_of_the_trainer(tmp_path, models, engines, form):
    before, variables = len(engines), {name: os.environ.get(name) for name in LAUNCH_VARIABLES}
    frozen = {"frozen_agents": ["main"]} if form == "frozen" else {}
    team = make_team("full" if form == "frozen" else form, models)
    trainer = train(tmp_path, team, **frozen, learning_rate=0.1 if form == "lora" else 0.5)
    made = [arguments for _, arguments in engines[before:]]
    assert [arguments["dtype"] for arguments in made] == ["float32"] * (2 if form in ("full", "frozen") else 1)
    assert variables == {name: os.environ.get(name) for name in LAUNCH_VARIABLES}
    if form == "lora":
        folder = trainer.generator.agents["aux"].node_folder  # the last two of two times three
        assert sorted(path.name for path in folder.iterdir()) == ["aux-shared-5", "main-shared-6"]


def test_a_run_that_resumes_equals_one_that_did_not_stop(tmp_path, models):
    whole = train(tmp_path / "whole", make_team("full", models))
    train(tmp_path / "parts", make_team("full", models), **SAVED, max_steps=2, lr_scheduler_type="constant")
    rest = train(tmp_path / "parts", make_team("full", models), resume=True, **SAVED)
    last, expected = (next(x for x in trainer.state.log_history if x.get("step") == 3) for trainer in (rest, whole))
    assert last["reward"] == expected["reward"]
    for name, x in whole.team.state_dict().items():
        assert torch.equal(x, rest.team.state_dict()[name]), name


@pytest.mark.parametrize("form", ["full", "lora"])
def test_stop_strings_by_role(tmp_path, models, form):
    strings = {"aux": ["ab"], "main": ["c", "ba"]}
    settings = {"use_vllm": True, "stop_strings": strings, "generation_kwargs": ONLY_ABC, "temperature": 2.0}
    args = tiny_config(tmp_path, **settings, vllm_max_model_length=TRAINING["vllm_max_model_length"])
    policies = make_team(form, models).policies
    team = SimpleNamespace(policies=policies, end_tokens=lambda role: [256])
    generations = make_generations(team, Accelerator(cpu=True), args)
    prompts = {role: [[65, 66, 67], [70]] for role in models}
    for role in prompts:
        generations[role].update(role, 0)
    completions = sample_turn(generations, prompts, 16, Accelerator(cpu=True))
    for role, of_role in completions.items():
        assert [*map(len, of_role)] == [16, 16]
        assert all(len(ids) == len(ids.logps) for completions in of_role for ids in completions)
        check_stop_strings(of_role, strings[role])

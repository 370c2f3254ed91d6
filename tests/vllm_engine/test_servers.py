"""vLLM's server in processes of its own."""

from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from transformers import TrainerCallback

from trl_multiagent.environments.task_errors import UnavailableError
from trl_multiagent.trainers.base import vllm
from trl_multiagent.trainers.base.vllm import EngineError, make_generations, sample_turn

from cpu_vllm import ONLY_ABC, check_stop_strings, make_team, train
from tiny import tiny_config


SERVED = {"vllm_mode": "server", "vllm_server_timeout": 600.0}


def test_full_models_as_files(tmp_path, models, full_servers):
    team = make_team("full", models)
    trainer = train(tmp_path, team, **SERVED, vllm_server_base_urls=full_servers, vllm_weight_transfer="files")
    assert trainer.generator.agents["aux"].num_folders == 3  # steps
    assert not list(tmp_path.rglob("*.safetensors"))


def test_adapters_on_one_base(tmp_path, models, lora_server):
    where = {"vllm_server_base_url": lora_server.url}
    train(tmp_path, make_team("lora", models), **SERVED, **where, learning_rate=0.1)


def test_stop_strings_by_role(tmp_path, models, lora_server):
    strings = {"aux": ["ab"], "main": ["c", "ba"]}
    settings = {"use_vllm": True, "stop_strings": strings, "generation_kwargs": ONLY_ABC, "temperature": 2.0}
    args = tiny_config(tmp_path, **settings, **SERVED, vllm_server_base_url=lora_server.url)
    policies = make_team("lora", models).policies
    team = SimpleNamespace(policies=policies, end_tokens=lambda role: [256])
    generations = make_generations(team, Accelerator(cpu=True), args)
    prompts = {role: [[65, 66, 67], [70]] for role in models}
    for role in prompts:
        policies[role].set_adapter(role)
        generations[role].update(role, 0)
    for role, completions in sample_turn(generations, prompts, 16, Accelerator(cpu=True)).items():
        check_stop_strings(completions, strings[role])


def test_a_server_with_another_base_is_refused(tmp_path, models, lora_server):
    team = make_team("lora", {"aux": models["main"], "main": models["aux"]})
    with pytest.raises(EngineError, match=r"^Step 1: .* sampled for agent 'aux' differ") as error:
        train(tmp_path, team, **SERVED, vllm_server_base_url=lora_server.url)
    assert "\n" not in str(error.value)


def test_a_server_that_dies_ends_the_run_with_one_line(tmp_path, models, lora_server, monkeypatch):
    """The last test with this server."""
    monkeypatch.setattr(vllm, "SECONDS_TO_ANSWER", 1.0)

    class Killer(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            lora_server.kill()

    settings = {**SERVED, "vllm_server_base_url": lora_server.url}
    with pytest.raises(UnavailableError) as error:
        train(tmp_path, make_team("lora", models), callbacks=[Killer()], **settings)
    message = str(error.value)
    assert message.startswith(f"agent 'aux': the vLLM server at {lora_server.url} gave no answer (")
    assert message.endswith("resume the run. There is no checkpoint.") and "\n" not in message

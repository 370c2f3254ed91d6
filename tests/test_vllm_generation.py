"""Generation through vLLM. The tests need no GPU: `vllm_double.py` describes which parts of vLLM are replaced."""

import copy
import math
import os
import threading
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from trl_multiagent import AgentTeam, FunctionEnvironment, MAACConfig, MAACTrainer, MAGRPOConfig, MAGRPOTrainer
from trl_multiagent.environments.task_errors import UnavailableError
from trl_multiagent.models.generation import Completion
from trl_multiagent.rollout.tree import Samples
from trl_multiagent.trainers.base.vllm import AgentGeneration, EngineError, check_machine


pytest.importorskip("requests", reason="TRL's client of vLLM servers needs the package requests")

from tiny import SAVED, byte_tokenizer, count_reward, tiny_items, tiny_llama, tiny_trainer
from vllm_double import LLM, VLLMServer, free_ports, install


EOS = [256]


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # TRL sets them for an engine
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    install(monkeypatch)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Two different models in folders."""
    folders = {}
    for seed, role in enumerate(("aux", "main")):
        folders[role] = str(tmp_path_factory.mktemp(role))
        tiny_llama(seed).save_pretrained(folders[role])
        byte_tokenizer().save_pretrained(folders[role])
    return folders


def team_of(models) -> AgentTeam:
    return AgentTeam.from_pretrained(list(models.values()), roles=list(models), dtype=torch.float32)


class Weights(TrainerCallback):
    """Records the team's weights before every optimizer step."""

    def __init__(self):
        self.snapshots = []

    def on_step_begin(self, args, state, control, model, **kwargs):
        self.snapshots.append(copy.deepcopy(model.state_dict()))


class Recorded(MAGRPOTrainer):
    """Records the samples."""

    def _sample(self, nodes, num_generations):
        samples = super()._sample(nodes, num_generations)
        self.__dict__.setdefault("samples", []).extend(samples[role] for role in self.team.roles)
        return samples


class Replayed(MAGRPOTrainer):
    """Returns the samples that another trainer recorded."""

    def _sample(self, nodes, num_generations):
        recorded = {role: self.samples.pop(0) for role in self.team.roles}
        return {
            role: [Samples(s.prompt_ids, s.completion_ids, s.texts) for s in of_role]
            for role, of_role in recorded.items()
        }


TRAINING = {"max_steps": 2, "num_turns": 2, "temperature": 0.8, "optim": "sgd", "learning_rate": 0.5}
TRAINING["per_device_train_batch_size"] = 16


def train_with_servers(tmp_path, models, shift=0.0, team=None, **settings):
    with VLLMServer(models["aux"], shift=shift) as aux, VLLMServer(models["main"], shift=shift) as main:
        weights = Weights()
        urls = {"vllm_server_base_urls": {"aux": aux.url, "main": main.url}, "vllm_group_port": free_ports(2)}
        settings = {**TRAINING, "use_vllm": True, "vllm_mode": "server", **urls, **settings}
        team = team or team_of(models)
        trainer = tiny_trainer(tmp_path, team, trainer=Recorded, callbacks=[weights], **settings)
        trainer.train()
    return trainer, {"aux": aux, "main": main}, weights.snapshots


@pytest.fixture(scope="module")
def served(tmp_path_factory, models):
    """One run with a server per agent, which several tests inspect."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield train_with_servers(tmp_path_factory.mktemp("served"), models, top_p=0.9, top_k=50, min_p=0.01)


def test_each_agent_asks_its_own_server(served):
    trainer, servers, _ = served
    samples = iter(trainer.samples)
    for call in range(2 * 2):  # steps and turns
        for role in ("aux", "main"):
            body, answered = servers[role].completions[call], next(samples)
            assert body["prompt"] == [s.prompt_ids for s in answered]
            assert len(body["prompt"]) == (2 if call % 2 == 0 else 2 * 4)
            text = trainer.team.tokenizers[role].decode(body["prompt"][0])
            assert text.startswith("Task ") and f"part {role}:" in text
            assert body["model"] == servers[role].name
            expected = {"n": 4, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "max_tokens": 8}
            expected |= {"repetition_penalty": 1.0, "stop_token_ids": EOS, "ignore_eos": True, "logprobs": 0}
            assert {name: body[name] for name in expected} == expected
            assert "seed" not in body
    assert all(len(server.completions) == 4 for server in servers.values())
    completions = [ids for answered in trainer.samples for s in answered for ids in s.completion_ids]
    assert any(ids[-1] == EOS[0] for ids in completions) and any(len(ids) == 8 for ids in completions)
    assert all(EOS[0] not in ids[:-1] and (len(ids) == 8 or ids[-1] == EOS[0]) for ids in completions)


def test_weights_are_sent_once_per_step(served):
    _, servers, snapshots = served
    assert len(snapshots) == 2
    for role, server in servers.items():
        assert len(server.updates) == 2 and server.paths.count("/update_weights") == 2
        for snapshot, received in zip(snapshots, server.updates, strict=True):
            for name, x in received.items():
                assert torch.equal(x, snapshot[f"models.{role}.{name}"]), name
    changed = [name for name, x in snapshots[0].items() if not torch.equal(x, snapshots[1][name])]
    assert {name.split(".")[1] for name in changed} == {"aux", "main"}


def test_the_update_equals_that_on_the_same_completions_without_vllm(served, tmp_path, models):
    trainer, *_ = served
    other = tiny_trainer(tmp_path, team_of(models), trainer=Replayed, **TRAINING)
    other.samples = list(trainer.samples)
    other.train()
    start = team_of(models).state_dict()
    for name, x in other.team.state_dict().items():
        assert torch.allclose(x, trainer.team.state_dict()[name], rtol=1e-4, atol=1e-6), name
    assert max((x - start[name]).abs().max() for name, x in other.team.state_dict().items()) > 1e-2
    for left, right in zip(trainer.state.log_history[:2], other.state.log_history[:2], strict=True):
        for name in ("loss", "reward", "agents/aux/loss", "agents/main/loss", "agents/main/entropy", "num_tokens"):
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-5), name
        assert left["agents/aux/sampling_logp_difference"] < 1e-4


@pytest.mark.parametrize("corrects", [True, False])
def test_the_correction_multiplies_the_loss(tmp_path, models, corrects):
    """The servers report 1.25 times the probability of every token, so every token's loss is divided by it."""
    settings = {"max_steps": 1, "num_turns": 1, "vllm_importance_sampling_mode": "token_truncate"}
    settings |= {"per_device_train_batch_size": 1, "max_completion_length": 32}  # rows of several lengths
    settings["vllm_importance_sampling_correction"] = corrects
    trainer, _, (before,) = train_with_servers(tmp_path / "1", models, math.log(1.25), **settings)
    assert len({len(ids) for samples in trainer.samples for s in samples for ids in s.completion_ids}) > 1
    other = tiny_trainer(tmp_path / "2", team_of(models), trainer=Replayed, **{**TRAINING, **settings})
    other.samples = list(trainer.samples)
    other.train()
    for name, x in trainer.team.state_dict().items():
        step, full_step = x - before[name], other.team.state_dict()[name] - before[name]
        assert torch.allclose(step, full_step / (1.25 if corrects else 1.0), rtol=1e-3, atol=1e-6), name
        assert full_step.abs().max() > 1e-5
    difference = trainer.state.log_history[0]["agents/aux/sampling_logp_difference"]
    assert difference == pytest.approx(math.log(1.25), abs=1e-4)


def test_the_next_step_is_asked_for_before_the_update(tmp_path, models):
    """The servers get the weights of the first two steps, of which the second ones sample the third step."""
    trainer, servers, snapshots = train_with_servers(
        tmp_path, models, rollouts_ahead=1, max_steps=3, learning_rate=0.05
    )
    for role, server in servers.items():
        assert len(server.updates) == 2
        for snapshot, received in zip(snapshots, server.updates, strict=False):
            assert all(torch.equal(x, snapshot[f"models.{role}.{name}"]) for name, x in received.items())
    first, *others = (entry["agents/aux/sampling_logp_difference"] for entry in trainer.state.log_history[:3])
    assert first < 1e-4 < 1e-3 < min(others)


# One engine per model in this process


def test_full_models_have_an_engine_each(tmp_path, models):
    weights = Weights()
    settings = {**TRAINING, "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 512, "use_vllm": True}
    before = dict(os.environ)  # TRL changes it for an engine
    trainer = tiny_trainer(tmp_path, team_of(models), callbacks=[weights], **settings)
    engines = dict(zip(("aux", "main"), LLM.instances, strict=True))
    trainer.train()
    assert dict(os.environ) == before
    for role, engine in engines.items():
        assert engine.arguments["model"] == models[role] and engine.arguments["dtype"] == "float32"
        assert engine.arguments["gpu_memory_utilization"] == pytest.approx(0.15)
        assert engine.arguments["max_num_seqs"] == trainer.args.rows_per_device
        assert engine.arguments["max_model_len"] == 512
        assert [(name, number) for name, number, _ in engine.calls] == [(None, 2 * 4), (None, 2 * 4 * 4)] * 2
        assert engine.calls[0][2]["n"] == 1 and engine.calls[0][2]["temperature"] == 0.8
        assert engine.calls[0][2]["stop_token_ids"] == EOS and engine.calls[0][2]["ignore_eos"]
        # The weights were sent at both steps, so the engine has those from before the second step
        names = list(dict(team_of(models).agents[role].named_parameters()))
        assert engine.loaded_weights == names * 2
        for name, x in engine.model.named_parameters():
            assert torch.equal(x, weights.snapshots[1][f"models.{role}.{name}"]), name
    assert trainer.state.log_history[1]["agents/main/sampling_logp_difference"] < 1e-4


# Complete training runs with the other forms of a team


def train(tmp_path, team, **settings):
    trainer = tiny_trainer(tmp_path, team, trainer=Recorded, use_vllm=True, **{**TRAINING, **settings})
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        for role in team.trained_roles:  # the engine sampled with the weights from before the update
            assert 0 < entry[f"agents/{role}/sampling_logp_difference"] < 1e-4
    return trainer


def lora_team(models) -> AgentTeam:
    torch.manual_seed(0)
    peft_config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return AgentTeam.from_pretrained(models["aux"], ["aux", "main"], peft_config, dtype=torch.float32)


def test_adapters_share_one_engine_that_sleeps(tmp_path, models):
    team = lora_team(models)
    start = copy.deepcopy(team.state_dict())
    trainer = train(tmp_path, team, vllm_enable_sleep_mode=True)
    (engine,) = LLM.instances
    expected = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "model": models["aux"]}
    assert {name: engine.arguments[name] for name in expected} == expected and engine.awake == set()
    assert [names for names, *_ in engine.calls] == [["aux", "main"]] * 4  # two steps of two turns
    assert len(engine.adapters) == 4 and engine.loaded_weights == []
    assert trainer.generator.agents["aux"].num_shared == 4
    for name, x in team.state_dict().items():
        assert torch.equal(x, start[name]) == ("lora_" not in name), name


def test_adapters_share_one_server(tmp_path, models):
    with VLLMServer(models["aux"], weight_transfer=False, lora=True) as server:
        where = {"vllm_server_base_url": server.url, "vllm_adapter_dir": str(tmp_path / "x")}
        train(tmp_path / "out", lora_team(models), vllm_mode="server", **where)
    assert sorted(body["model"] for body in server.completions) == ["aux"] * 4 + ["main"] * 4
    assert len(server.adapter_paths) == 4 == len(set(server.adapter_paths))
    assert all(path.startswith(str(tmp_path / "x")) for path in server.adapter_paths)
    assert not {"/update_weights", "/init_weight_transfer_engine"} & set(server.paths)  # nothing was merged


def test_a_server_that_does_not_accept_adapters_is_reported(tmp_path, models):
    with VLLMServer(models["aux"]) as server:
        with pytest.raises(EngineError, match=r"weights of agent 'aux'.*404.*--max-loras 2 --max-lora-rank 8"):
            train(tmp_path, lora_team(models), vllm_mode="server", vllm_server_base_url=server.url)


def test_an_engine_has_no_critics(tmp_path, models):
    settings = {**TRAINING, "critic_form": "adapter", "critic_learning_rate": 0.5, "num_generations": 2}
    settings |= {"trainer": MAACTrainer, "config": MAACConfig, "use_vllm": True}
    trainer = tiny_trainer(tmp_path, lora_team(models), **settings)
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        for role in ("aux", "main"):
            assert 0 < entry[f"agents/{role}/sampling_logp_difference"] < 1e-4
    (engine,) = LLM.instances
    assert len(engine.adapters) == 4 and not engine.loaded_weights


def test_full_models_as_files_on_servers_that_work_at_the_same_time(tmp_path, models, monkeypatch):
    """Each server answers when both were asked."""
    both, answer = threading.Barrier(2, timeout=60), VLLMServer.answer

    def answer_together(self, path, body):
        if path in ("/v1/completions", "/collective_rpc"):
            both.wait()
        return answer(self, path, body)

    monkeypatch.setattr(VLLMServer, "answer", answer_together)
    trainer, servers, snapshots = train_with_servers(tmp_path, models, vllm_weight_transfer="files")
    for role, server in servers.items():
        assert len(server.updates) == 2 and not {"/update_weights", "/init_weight_transfer_engine"} & set(server.paths)
        for snapshot, received in zip(snapshots, server.updates, strict=True):
            for name, x in received.items():
                assert torch.equal(x, snapshot[f"models.{role}.{name}"]), name
    assert trainer.state.log_history[1]["agents/main/sampling_logp_difference"] < 1e-4
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_stop_strings_by_role(tmp_path, models, mode):
    strings = {"aux": [*"aeiou"], "main": [*"0123456789"]}
    settings = {"stop_strings": strings, "max_completion_length": 24, "max_steps": 1}
    if mode == "server":
        trainer, *_ = train_with_servers(tmp_path, models, **settings)
    else:
        trainer = tiny_trainer(tmp_path, team_of(models), trainer=Recorded, use_vllm=True, **{**TRAINING, **settings})
        trainer.train()
    ended = {"aux": 0, "main": 0}
    for samples, role in zip(trainer.samples, ["aux", "main"] * 2, strict=True):
        for s in samples:
            for g, text in enumerate(s.texts):
                found = [any(x in part for x in strings[role]) for part in (text[:-1], text)]
                assert not found[0] and (found[1] or len(s.completion_ids[g]) == 24 or s.completion_ids[g][-1] == 256)
                assert len(s.logps[g]) == len(s.completion_ids[g]) and s.is_finished(g, EOS) >= found[1]
                ended[role] += found[1]
    assert min(ended.values()) > 4


def test_a_server_that_dies_ends_the_run_with_one_line(tmp_path, models, monkeypatch):
    monkeypatch.setattr("trl_multiagent.trainers.base.vllm.SECONDS_TO_ANSWER", 0.0)
    answer = VLLMServer.answer

    def answer_once(self, path, body):
        content = answer(self, path, body)
        if len(self.updates) == 1 and len(self.completions) == 2 and self.name == models["main"]:
            threading.Thread(target=self.server_close).start()
            self.shutdown()
        return content

    monkeypatch.setattr(VLLMServer, "answer", answer_once)
    with pytest.raises(UnavailableError) as error:
        train_with_servers(tmp_path, models, vllm_weight_transfer="files")
    message = str(error.value)
    assert message.startswith("agent 'main': the vLLM server at http://127.0.0.1:") and "\n" not in message
    assert "gave no answer (" in message and message.endswith(
        "start it again as before, and resume the run. There is no checkpoint."
    )


def test_shared_weights_on_one_server(tmp_path, models):
    team = AgentTeam.from_pretrained(models["aux"], ["aux", "main"], share_weights=True, dtype=torch.float32)
    with VLLMServer(models["aux"]) as server:
        where = {"vllm_server_base_url": server.url, "vllm_group_port": free_ports(1)}
        train(tmp_path, team, vllm_mode="server", **where)
    assert len(server.completions) == 2 * 4 and len(server.updates) == 2


def test_shared_weights_in_one_engine_that_sleeps(tmp_path, models):
    team = AgentTeam.from_pretrained(models["aux"], ["aux", "main"], share_weights=True, dtype=torch.float32)
    train(tmp_path, team, vllm_enable_sleep_mode=True)
    (engine,) = LLM.instances
    assert len(engine.calls) == 2 * 2 and engine.awake == set()


def test_an_adapter_and_a_frozen_full_model_have_an_engine_each(tmp_path, models):
    adapters = {"aux": LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)}
    team = AgentTeam.from_pretrained(list(models.values()), list(models), adapters, dtype=torch.float32)
    trainer = train(tmp_path, team, beta=0.1, frozen_agents=["main"])
    aux, main = LLM.instances
    assert len(aux.adapters) == 2 and len(aux.calls) == len(main.calls) == 4
    names = dict(team.agents["main"].named_parameters())
    assert main.loaded_weights == list(names)  # the weights of a frozen agent are sent once
    assert trainer.state.log_history[1]["agents/aux/kl"] > 0


# An engine with other weights than the trainer


def lost(self):
    """Weights that do not arrive."""


@pytest.mark.parametrize("corrects", [True, False])
def test_weights_that_do_not_arrive_in_an_engine_end_the_training(tmp_path, models, monkeypatch, corrects):
    sync = AgentGeneration.sync_weights
    monkeypatch.setattr(AgentGeneration, "sync_weights", lambda self: lost(self) if self.sent_steps else sync(self))
    settings = {**TRAINING, "num_turns": 1, "max_steps": 8, "learning_rate": 5.0, **SAVED}
    settings["vllm_importance_sampling_correction"] = corrects
    trainer = tiny_trainer(tmp_path, team_of(models), use_vllm=True, **settings)
    with pytest.raises(UnavailableError) as error:
        trainer.train()
    step = trainer.state.global_step
    words = [f"Step {step + 1}: ", "sampled for agent 'aux'", " nats per token, and ", "restart it with the agent's"]
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert f"The last complete checkpoint is {tmp_path / f'checkpoint-{step}'}." in str(error.value) and step > 0
    assert all(entry["agents/aux/sampling_logp_difference"] <= 0.3 for entry in trainer.state.log_history)
    monkeypatch.setattr(AgentGeneration, "sync_weights", sync)
    settings["max_steps"] = step + 1
    again = tiny_trainer(tmp_path, team_of(models), use_vllm=True, **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.log_history[-2]["agents/aux/sampling_logp_difference"] < 1e-4


def test_ratios_outside_of_their_bounds_end_the_training(tmp_path, models):
    settings = {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 0.8}
    with pytest.raises(EngineError, match=r"agent 'aux' differ .* by 0\.\d\d nats per token, and 100% of the ratios"):
        train_with_servers(tmp_path, models, 0.2, max_steps=1, **settings)


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_turns_at_which_a_role_does_not_act(tmp_path, models, mode):
    """Its engine gets no prompts. A frozen agent that acts alone has no row in the update."""
    prompts = {"aux": "Task {x}, part aux:", "main": "Task {x}, {aux}, part main:"}
    environment = FunctionEnvironment(prompts, count_reward, order=[["aux"], ["main"]])
    settings = {"environment": environment, "num_generations": 3, "frozen_agents": ["aux"]}
    if mode == "server":
        trainer, servers, _ = train_with_servers(tmp_path, models, **settings)
        calls = {role: [len(body["prompt"]) for body in server.completions] for role, server in servers.items()}
        assert calls == {"aux": [2, 2], "main": [6, 6]}
    else:
        trainer = tiny_trainer(tmp_path, team_of(models), use_vllm=True, **{**TRAINING, **settings})
        trainer.train()
        calls = [[number for _, number, _ in engine.calls if number] for engine in LLM.instances]
        assert calls == [[2 * 3] * 2, [2 * 3 * 3] * 2]
    first, second = trainer.state.log_history[:2]
    assert not {"agents/aux/sampling_logp_difference", "agents/aux/loss"} & first.keys()
    assert 0 < second["agents/main/sampling_logp_difference"] < 1e-4


def test_log_probabilities_that_are_missing_end_the_training(tmp_path, models, monkeypatch):
    sample = AgentGeneration.sample

    def without(self, *args):
        of_roles = sample(self, *args).items()
        return {
            role: [[Completion(x, [math.nan] * len(x)) for x in of_prompt] for of_prompt in of]
            for role, of in of_roles
        }

    monkeypatch.setattr(AgentGeneration, "sample", without)
    trainer = tiny_trainer(tmp_path, team_of(models), use_vllm=True, **TRAINING)
    with pytest.raises(EngineError, match="no log-probabilities for 100%"):
        trainer.train()


def test_a_server_with_another_model_ends_the_run(tmp_path, models):
    with VLLMServer(models["main"], weight_transfer=False, lora=True) as server:
        settings = {**TRAINING, "vllm_mode": "server", "vllm_server_base_url": server.url}
        trainer = tiny_trainer(tmp_path, lora_team(models), use_vllm=True, **settings)
        with pytest.raises(EngineError, match=r"^Step 1: .* sampled for agent 'aux' differ"):
            trainer.train()


# Refused settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generation_kwargs": {"seed": 1}}, "must not set 'seed'"),
        ({"generation_kwargs": {"stop": ["."]}}, "must not set 'stop'"),
        ({"vllm_weight_transfer": "gloo"}, "it must be 'nccl' or 'files'"),
        ({"vllm_tensor_parallel_size": 2}, "does not divide the 1 processes"),
    ],
)
def test_invalid_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        check_machine(MAGRPOConfig(str(tmp_path), use_vllm=True, use_cpu=True, bf16=False, **settings))


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (None, r"one URL for each of the roles \['aux', 'main'\]; it has none"),
        ({"aux": "http://a", "main": "http://a"}, "a server holds one model, but the agents have 2"),
    ],
)
def test_servers_that_do_not_fit_the_team_are_refused(tmp_path, models, urls, message):
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, team_of(models), use_vllm=True, vllm_mode="server", vllm_server_base_urls=urls)


def test_the_weights_of_the_best_model_are_sent_again(tmp_path, models):
    trainer = tiny_trainer(tmp_path, team_of(models), use_vllm=True, **SAVED)
    trainer.train()
    trainer.evaluate(tiny_items(1))
    held = len(LLM.instances[0].loaded_weights)
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    trainer._load_best_model()
    trainer.evaluate(tiny_items(1))
    assert len(LLM.instances[0].loaded_weights) > held


def test_the_weights_of_a_new_training_are_sent(tmp_path, models):
    """Its steps have the numbers of those of the training before."""
    trainer = tiny_trainer(tmp_path, team_of(models), use_vllm=True, **{**SAVED, "max_steps": 1})
    trainer.train()
    held = len(LLM.instances[0].loaded_weights)
    trainer.train()
    assert len(LLM.instances[0].loaded_weights) > held


def test_what_one_process_has_sent_alone_is_sent_again_by_all(tmp_path, models):
    trainer = tiny_trainer(tmp_path, team_of(models), use_vllm=True, **SAVED)
    trainer.train()
    generator, sent = trainer.generator, []
    generator.forget_weights()
    for agent in generator.agents.values():
        agent._send = lambda owner, together: sent.append((owner, together))
    for generator.synchronized in (False, False, True, True, False):
        generator.send(["aux"])
    assert sent == [("aux", False), ("aux", True)]


# Processes with different numbers of prompts


def test_two_processes(forked, tmp_path, models):
    script = Path(__file__).parent / "helpers" / "vllm_two_processes.py"
    with VLLMServer(models["aux"]) as server:
        finished = forked.run(script, tmp_path, models["aux"], server.url, free_ports(1), processes=2)
    assert finished.codes == [0, 0], finished.stderr[-4000:]
    of_ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for mode in ("server", "colocate"):  # colocate: one engine over both processes
        results = [result[mode] for result in of_ranks]
        assert [result["nodes"] for result in results] == [[1, 0], [1, 4]]
        for result in results:  # each process got the completions of its own prompts
            assert len(result["differences"]) == 2 and 0 < max(result["differences"]) < 1e-4
    # Adapters of two steps and two agents are written once for both processes, and to memory; the last ones are kept
    paths, others = (result["adapters"]["paths"] for result in of_ranks)
    assert paths == others and [len(result["adapters"]["written"]) for result in of_ranks] == [2, 0]
    for place, path in paths.items():
        assert path.startswith(str(tmp_path / ("out" if place == "disk" else "memory")))
    assert [result["adapters"]["left"] for result in of_ranks] == [2, 2]
    # Two steps of two turns
    assert [len(body["prompt"]) for body in server.completions] == [2, 4, 2, 4] and len(server.updates) == 2

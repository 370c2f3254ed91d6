"""What trainers, teams and environments say about arguments of a wrong type."""

import asyncio
import os
import random
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)
from trl import GRPOConfig, RewardConfig

from trl_multiagent import (
    AgentTeam,
    FunctionEnvironment,
    IACConfig,
    IACTrainer,
    JointRewardTrainer,
    MAACConfig,
    MADPOTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
    MARLOOTrainer,
    workflow,
)
from trl_multiagent.environments import TaskError
from trl_multiagent.environments.task_errors import UnavailableError
from trl_multiagent.trainers.base import team_config, team_trainer

from tiny import byte_tokenizer, team_of, tiny_environment, tiny_llama, tiny_team, tiny_trainer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"team": "some/model"}, r"`team` is 'some/model' \(str\), not an `AgentTeam`: `AgentTeam.from_"),
        ({"team": None}, "`team` is None, not an `AgentTeam`"),
        ({"args": GRPOConfig("x", use_cpu=True, bf16=False)}, "`args` is a `GRPOConfig`: give a `{config}`"),
        ({"args": MAACConfig("x", use_cpu=True)}, "`args` is a `MAACConfig`: give a `{config}`"),
        ({"args": {"output_dir": "x"}}, "`args` is a `dict`: give a `{config}`"),
        ({"environment": len}, "`environment` must be .*, got .*len.*: `@workflow"),
    ],
)
@pytest.mark.parametrize("trainer", [MAGRPOTrainer, MADPOTrainer, IACTrainer])
def test_arguments_of_a_wrong_type_are_refused(trainer, arguments, message):
    config = trainer.__name__.replace("Trainer", "Config")
    with pytest.raises(TypeError, match=message.replace("{config}", config)):
        trainer(**{"team": tiny_team(), "environment": tiny_environment(), **arguments})


def test_wrong_arguments_without_names_are_told_the_right_way():
    with pytest.raises(ValueError, match=r"`name` has models for \['aux'\], but the roles are \['aux', 'main'\]"):
        AgentTeam.from_pretrained({"aux": "model"}, roles=["aux", "main"])
    for name in (tiny_llama(), {"aux": tiny_llama(), "main": "model"}, [tiny_llama()], 5):
        with pytest.raises(ValueError, match=r"`name` is .*; it must be a model's name or folder, or a list with one"):
            AgentTeam.from_pretrained(name, roles=["aux", "main"])
    with pytest.raises(ValueError, match=r"The adapter of an agent is 8; it must be a `LoraConfig`"):
        AgentTeam.from_pretrained("model", ["aux"], peft_config={"r": 8})
    with pytest.raises(TypeError, match=r"takes no `device`: the trainer moves the team, or `team.to\(device\)` does"):
        AgentTeam.from_pretrained("model", ["aux"], device="cuda")
    with pytest.raises(TypeError, match="takes no `torch_dtype`: it is called `dtype` now"):
        AgentTeam.from_pretrained("model", ["aux"], torch_dtype="bfloat16")
    with pytest.raises(TypeError, match="takes no `model_init_kwargs`: give each of its entries as an argument"):
        AgentTeam.from_pretrained("model", ["aux"], model_init_kwargs={"dtype": "bfloat16"})

    async def forgetful(agents):
        return 1.0

    with pytest.raises(TypeError, match=r"two arguments, `item` and `agents`; this one is `forgetful\(agents\)`"):
        workflow(roles=("aux",))(forgetful)
    with pytest.raises(TypeError, match=r"must be dicts by role; `AgentTeam.from_pretrained"):
        AgentTeam(tiny_llama(), byte_tokenizer())
    for prompts in ("Write {words}", ["Write {words}"]):
        with pytest.raises(
            TypeError, match=r"`prompts` is .*; it must be a dict with a template or a function per role"
        ):
            FunctionEnvironment(prompts, len)


def failing(completions, **columns):
    return 1 / len(columns["missing"])


class Scored(FunctionEnvironment):
    def score(self, *args):
        return super().score(*args)


async def ask(agents):
    await agents.aux("Go:")
    await agents.writer("Go:")


@workflow(roles=("aux",))
async def wrong(item, agents):
    await agents.aux("Go:")
    return item["missing"]


@workflow(roles=("aux",))
async def misuse(item, agents):
    await ask(agents)


@workflow(roles=("aux",))
async def parts(item, agents):
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(agents))


def prompt(item):
    return item["missing"]


@pytest.mark.parametrize(
    ("environment", "message", "frames"),
    [
        (tiny_environment(("aux",), failing), "KeyError: 'missing'", ["failing"]),
        (Scored({"aux": "{x}"}, failing), "KeyError: 'missing'", ["score", "failing"]),
        (wrong, "KeyError: 'missing'", ["wrong"]),
        (misuse, "no role 'writer'", ["misuse", "ask"]),
        (parts, "no role 'writer'", ["ask"]),
    ],
)
@pytest.mark.parametrize("method", ["train", "evaluate", "collaborate"])
def test_the_traceback_of_a_failed_task_has_its_own_code_alone(environment, message, frames, method, tmp_path):
    trainer = tiny_trainer(tmp_path, tiny_team(("aux",)), environment, num_turns=1)
    arguments = {"train": [], "evaluate": [trainer.train_dataset], "collaborate": [[trainer.train_dataset[0]]]}
    with pytest.raises(TaskError, match=message) as failed:
        getattr(trainer, method)(*arguments[method])
    names = [frame.name for frame in traceback.extract_tb(failed.value.__traceback__)]
    assert names[2:] == frames  # after this test and the trainer


def test_a_prompt_that_fails_when_a_trainer_is_made_is_shown_alone(tmp_path):
    with pytest.raises(TaskError, match="`prompt` of 'aux' raised KeyError: 'missing'") as failed:
        tiny_trainer(tmp_path, tiny_team(("aux",)), FunctionEnvironment({"aux": prompt}, failing))
    names = [frame.name for frame in traceback.extract_tb(failed.value.__traceback__)]
    assert names[-2:] == ["run", "prompt"]


def test_the_error_of_a_task_keeps_what_caused_it(tmp_path):
    class Unsolvable(TaskError):
        pass

    def judge(completions, **columns):
        try:
            return columns["missing"]
        except KeyError:
            told = ValueError("no judge")
            told.add_note("Start one.")
            raise told  # noqa: B904 - while the other is handled

    def importing(completions, **columns):
        import a_library_that_is_missing  # noqa: F401

    @workflow(roles=("aux",))
    async def unsolvable(item, agents):
        raise Unsolvable("This item has no solution")

    team = tiny_team(("aux",))
    for code, kind, message in (
        (judge, TaskError, "ValueError: no judge\nStart one.$"),
        (importing, UnavailableError, "No module named 'a_library_that_is_missing'. There is no checkpoint.$"),
        (unsolvable, Unsolvable, r"This item has no solution \(line \d+ of test_wrong_arguments.py\)$"),
    ):
        environment = code if code is unsolvable else tiny_environment(("aux",), code)
        with pytest.raises(kind, match=message) as failed:
            tiny_trainer(tmp_path, team, environment, num_turns=1).train()
        if code is judge:
            assert isinstance(failed.value.__cause__, KeyError)


def test_a_role_that_acts_in_no_turn_is_told(tmp_path, caplog):
    @workflow(roles=("first", "second"))
    async def in_order(item, agents):
        return float(len(await agents.second(str(await agents.first("Go:")))))

    tiny_trainer(tmp_path, tiny_team(in_order.roles), in_order, num_turns=2)
    assert not caplog.messages
    tiny_trainer(tmp_path, tiny_team(in_order.roles), in_order, num_turns=1)
    assert caplog.messages == ["'second' is not asked in the first turn, and `num_turns` is 1: raise it."]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"items_per_device": 2, "gradient_accumulation_steps": 4}, "leave one of them out"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}, "set `gradient_accumulation_st"),
        ({"reward_weights": [1.0, 2.0]}, "teams do not support: an argument of `FunctionEnvironment`"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps"}, "need a `metric_for_best_model`"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "need a `metric_for_best_model`"),
    ],
)
def test_settings_that_would_do_something_else_than_in_trl_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        MAGRPOConfig(tmp_path, use_cpu=True, **settings)


@pytest.mark.parametrize(
    ("trainer", "config", "has_scheduler", "settings"),
    [
        (IACTrainer, IACConfig, False, {}),
        (MAGRPOTrainer, MAGRPOConfig, True, {"agent_learning_rates": {"aux": 0.0}}),
    ],
)
def test_an_optimizer_that_cannot_do_what_is_asked_is_refused(tmp_path, trainer, config, has_scheduler, settings):
    team = tiny_team()
    optimizer = torch.optim.SGD(team.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) if has_scheduler else None
    with pytest.raises(ValueError, match="an optimizer that the trainer makes: leave `optimizers` out"):
        tiny_trainer(tmp_path, team, None, trainer, config, optimizers=(optimizer, scheduler), **settings)


def test_models_with_logits_of_their_own_are_refused(tmp_path):
    sizes = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertLMHeadModel(BertConfig(**sizes, intermediate_size=48, is_decoder=True, initializer_range=0.2))
    bert.generation_config.eos_token_id = 256
    with pytest.raises(ValueError, match="BertLMHeadModel cannot be trained: TRL computes log-probabilities from"):
        tiny_trainer(tmp_path, AgentTeam({"aux": bert}, {"aux": byte_tokenizer()}), tiny_environment(("aux",)))
    # Rounding of logits that are changed after the product is no other way of computing them
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32, "initializer_range": 0.3}
    gemma = Gemma2ForCausalLM(Gemma2Config(**sizes, eos_token_id=256, final_logit_softcapping=30.0)).bfloat16()
    team = AgentTeam(
        {"aux": get_peft_model(gemma, LoraConfig(target_modules="all-linear"), "aux")}, {"aux": byte_tokenizer()}
    )
    assert tiny_trainer(tmp_path, team, tiny_environment(("aux",)), temperature=0.1).train().global_step > 0


def test_models_without_attention_train(tmp_path):
    sizes = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 1, "eos_token_id": 256, "pad_token_id": 257}
    team = AgentTeam({"aux": MambaForCausalLM(MambaConfig(**sizes))}, {"aux": byte_tokenizer()})
    settings = {"per_device_train_batch_size": "auto", "num_turns": 1}
    assert tiny_trainer(tmp_path, team, tiny_environment(("aux",)), **settings).train().global_step == 1


def test_chat_messages_do_not_become_words_of_a_prompt():
    environment = FunctionEnvironment({"aux": "{prompt}"}, len_reward)
    with pytest.raises(TaskError, match=r"has chat messages; take `lambda item: item\['prompt'\]`"):
        environment.prompts({"prompt": [{"role": "user", "content": "Go."}]}, ())
    assert environment.prompts({"prompt": []}, ()) == {"aux": "[]"}


def len_reward(completions, **columns):
    return [float(len(completion["aux"])) for completion in completions]


def test_the_configuration_of_another_algorithm_is_refused(tmp_path):
    """MARLOO would train with the baseline of MAGRPO."""
    with pytest.raises(TypeError, match="`args` is a `MAGRPOConfig`: give a `MARLOOConfig`"):
        MARLOOTrainer(tiny_team(), tiny_environment(), MAGRPOConfig(tmp_path, use_cpu=True))
    with pytest.raises(TypeError, match="`args` is a `RewardConfig`: give a `JointRewardConfig`"):
        JointRewardTrainer("model", RewardConfig(tmp_path, use_cpu=True, bf16=False))


def test_attention_without_masks_says_what_it_costs(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(MAGRPOTrainer, "_check_heads", lambda *args: None)  # flash attention needs a GPU
    team = tiny_team()
    team.agents["aux"].config._attn_implementation = "flash_attention_2"
    tiny_trainer(tmp_path, team)
    (line,) = [message for message in caplog.messages if "takes no masks" in message]
    assert "'flash_attention_2'" in line and "'sdpa'" in line


def test_kernels_of_liger_leave_the_loss_alone(tmp_path, monkeypatch):
    patched = []
    monkeypatch.setattr(team_config, "is_liger_kernel_available", lambda: False)
    with pytest.raises(ImportError, match="pip install liger-kernel"):
        tiny_trainer(tmp_path, use_liger_kernel=True)
    monkeypatch.setattr(team_config, "is_liger_kernel_available", lambda: True)
    monkeypatch.setattr(team_trainer, "apply_liger_kernel", lambda model, config: patched.append((model, config)))
    trainer = tiny_trainer(tmp_path, use_liger_kernel=True, liger_kernel_config={"swiglu": False})
    trainer.train()
    assert [model for model, _ in patched] == trainer.team.base_models
    assert patched[0][1] == {"swiglu": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
    assert trainer.args.use_liger_kernel


COMPILED = """
import sys

import torch

sys.path.insert(0, sys.argv[1])
from torch._dynamo.utils import counters
from tiny import team_of, tiny_trainer

runs = []

@torch._dynamo.register_backend
def counting(module, inputs):
    return lambda *args: runs.append(torch.is_grad_enabled()) or module(*args)

teams = []
for compiled in ({}, {"torch_compile_backend": "counting"}):
    teams.append(team_of("lora", num_hidden_layers=10))  # more than torch compiles of a function by default
    tiny_trainer("run", teams[-1], max_steps=2, **compiled).train()
assert all(map(torch.equal, *(team.parameters() for team in teams)))
assert runs == [True] * 2 * 10, len(runs)
assert not counters["graph_break"], counters
"""


def test_compiled_layers_leave_the_update_alone(tmp_path):
    """Also where agents share a forward, of as many layers as a model has. Sampling compiles nothing."""
    helpers = Path(__file__).parents[1] / "helpers"
    command = [sys.executable, "-c", COMPILED, str(helpers)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "TORCHDYNAMO_DISABLE": "0"}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def test_adapters_are_not_compiled_where_activations_are_recomputed(tmp_path):
    with pytest.raises(ValueError, match=r"compiles no LoRA agents .* `gradient_checkpointing: false`"):
        tiny_trainer(tmp_path, team_of("lora"), torch_compile=True, gradient_checkpointing=True)
    assert not MAGRPOConfig("unused", use_cpu=True, torch_compile_backend="inductor").gradient_checkpointing


def test_zero_3_compiles_no_layers(monkeypatch):
    monkeypatch.setattr(MAGRPOConfig, "zero_stage", 3)
    with pytest.raises(ValueError, match="but ZeRO-3 gathers their weights"):
        MAGRPOConfig("unused", use_cpu=True, torch_compile=True)


@pytest.mark.parametrize("name", ["backend", "mode"])
def test_an_unknown_compiler_is_refused(name):
    with pytest.raises(ValueError, match=r"`torch_compile_backend` or `torch_compile_mode`: .*inducter"):
        MAGRPOConfig("unused", use_cpu=True, **{f"torch_compile_{name}": "inducter"})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"random": random.Random(1)}, "`Stateful.state_dict`, which has to return plain values and tensors, raised"),
        ({"position": 3}, "`Stateful.load_state_dict` raised NotImplementedError"),
    ],
)
def test_a_state_that_no_run_could_resume_is_refused_at_once(tmp_path, state, message):
    class Stateful(FunctionEnvironment):
        def state_dict(self):
            return state

    environment = Stateful({"aux": "a", "main": "b"}, lambda completions, **_: [0.0] * len(completions))
    with pytest.raises(TaskError, match=message):
        tiny_trainer(tmp_path, environment=environment)

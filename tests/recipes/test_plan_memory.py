"""
The memory that `trl-multiagent plan` computes, against hand-computed bytes, teams that are built, and measured peaks.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import yaml

from trl_multiagent import AgentTeam, IACConfig, MAGRPOConfig, cli
from trl_multiagent.environments.yaml_task import TASK
from trl_multiagent.models.packing import pack
from trl_multiagent.runs.plan import memory_lines, plan_size
from trl_multiagent.trainers.base.memory import Size, memory_parts

from prepared import parse_recipe
from tiny import byte_tokenizer, tiny_llama


def size(**changes):
    values = {"trained": 1000, "frozen": 0, "base": 0, "base_bytes": 4.0, "largest": 500}
    values |= {"agents": 2, "acting": 2, "common": 0}
    return Size(**{**values, "dimensions": tiny_llama().config, "prompt": 10, **changes})


def parts(stage=0, processes=1, bf16=False, of=None, **changes):
    args = MAGRPOConfig("plan", bf16=bf16, use_cpu=True, max_completion_length=6, report_to="none", **changes)
    return memory_parts(args, of or size(), stage, processes)


@pytest.mark.parametrize(
    ("stage", "processes", "bf16", "held", "gradients"),
    [
        (0, 1, False, 12, 4),
        (0, 1, True, 12, 4),
        (0, 4, True, 12 + 4, 4),  # and the buckets of DDP
        (1, 4, True, 2 + 12 / 4, 2),
        (2, 4, True, 2 + 12 / 4, 2 / 4),
        (3, 4, True, 16 / 4, 0),
        (3, 2, False, 20 / 2, 0),
    ],
)
def test_bytes_per_parameter(stage, processes, bf16, held, gradients):
    of_phase = parts(stage, processes, bf16)
    assert sum(of_phase["held"].values()) == 1000 * held
    assert of_phase["held"]["optimizer"] == 8000 / (processes if stage else 1)  # made by the first step
    assert of_phase["update"]["gradients"] == 1000 * gradients


def test_frozen_weights_and_references():
    lora = parts(of=size(trained=100, frozen=100, base=1000, base_bytes=2.0))["held"]
    assert lora["weights"] == 4 * 200 + 2 * 1000 and lora["optimizer"] == 800
    assert parts(3, 4, True, of=size(frozen=200))["held"]["weights"] == 2 * 1200 / 4


def test_sampling():
    config = tiny_llama().config
    rows = {"items_per_device": 3, "num_generations": 2, "per_device_train_batch_size": 6}
    alone, joint = (parts(of=size(prompt=1000, adapters=800, joint=n), **rows)["sampling"] for n in (1, 2))
    token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert alone["key-value cache"] == 3 * 2 * 1006 * token and joint["key-value cache"] == 2 * 3 * 2 * 1006 * token
    assert alone["stacked adapters"] == 0 and joint["stacked adapters"] == 4 * 800
    # Three prompts, without their completions
    reading = 3 * 1000 * (token + 4 * (4 * config.hidden_size + 3 * config.intermediate_size))
    assert alone["prompts"] == max(0, reading - alone["key-value cache"] - alone["probabilities"]) > 0


@pytest.mark.parametrize(("critic_type", "text"), [("v", 10), ("q", 16)])
def test_critics_are_in_the_same_backward(critic_type, text):
    rows = {"items_per_device": 4, "per_device_train_batch_size": 2, "max_completion_length": 6}
    rows |= {"gradient_checkpointing": False, "use_cpu": True, "report_to": "none"}
    args = IACConfig("plan", critic_type=critic_type, **rows)
    alone, all_ = (memory_parts(args, size(critics=n), 0, 1)["update"]["activations"] for n in (0, 2))
    assert all_ / alone == (2 * 2 * 16 + 2 * 2 * text) / (2 * 2 * 16)  # two agents, two rows of 10 + 6 tokens


# Peaks in MiB that benchmarks/memory/team.py measured: two full agents with 103.8 M parameters together, rows of about
# 30 tokens and benchmarks/memory/plan.py with 155.8 M
SMALL, LARGE = 103_835_648, 155_770_880
MEASURED = [
    (SMALL, 0, 1, True, 1354.8, 1845.5),
    (SMALL, 0, 1, False, 1252.9, 1659.0),
    (SMALL, 3, 2, True, 955.8, 1199.3),
    (LARGE, 0, 2, False, 2420.8, 3028.3),
    (LARGE, 0, 2, True, 2585.2, 3322.9),
    (LARGE, 1, 2, False, 1524.2, 2128.7),
    (LARGE, 1, 2, True, 1242.8, 1832.7),
    (LARGE, 2, 2, False, 1525.0, 2146.8),
    (LARGE, 2, 2, True, 1242.6, 1832.6),
]


# Peaks of LoRA teams: two agents of rank 8 on one base of 77.9 M parameters
LORA = 1_892_352
MEASURED += [
    (LORA, 0, 1, False, 347.7, 335.5),
    (LORA, 0, 1, True, 346.2, 360.1),
    (LORA, 3, 2, True, 256.8, 347.9),
]


@pytest.mark.parametrize(("parameters", "stage", "processes", "bf16", "sampling", "update"), MEASURED)
def test_measured_peaks(parameters, stage, processes, bf16, sampling, update):
    config = tiny_llama().config
    layers = 4 if parameters == SMALL else 6
    config.update({"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": layers})
    config.update({"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64})
    team = size(trained=parameters, largest=parameters // 2, dimensions=config, prompt=22)
    if parameters == LORA:
        team = dataclasses.replace(team, base=LARGE // 2, largest=LARGE // 2, joint=2, adapters=LORA)
    of_phase = parts(stage, processes, bf16, of=team, items_per_device=2 // processes, per_device_train_batch_size=2)
    sums = {phase: sum(numbers.values()) / 2**20 for phase, numbers in of_phase.items()}
    assert sums["held"] + sums["sampling"] == pytest.approx(sampling, rel=0.1)
    assert sums["held"] + sums["update"] == pytest.approx(update, rel=0.1)


@pytest.mark.parametrize(("rows", "measured"), [(64, 2.29), (8, 1.22)])
def test_measured_peak_of_a_real_model(rows, measured):
    """
    `hidden` with SmolLM2-135M in float32 on a CPU: LoRA agents, of which one acts per turn, without activation
    checkpointing, 12 and 48 rows of which at most 8 or 64 are in a micro-batch. The prompts of the first turn, which
    the plan reads, had 52 tokens, of which 34 are common to them. Measured in the first step, 2.212 and 1.139 GB; the
    optimizer's state of 0.078 GB comes after its peak.
    """
    config = tiny_llama().config
    config.update({"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152})
    config.update({"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64})
    team = size(trained=9_768_960, base=134_515_008, largest=139_399_488, dimensions=config, prompt=52, common=34)
    options = {"num_turns": 2, "num_generations": 4, "items_per_device": 3, "per_device_train_batch_size": rows}
    options |= {"max_completion_length": 8, "gradient_checkpointing": False}
    args = MAGRPOConfig("plan", use_cpu=True, bf16=False, report_to="none", **options)
    of_phase = memory_parts(args, dataclasses.replace(team, acting=1), 0, 1)
    sums = {phase: sum(numbers.values()) / 1e9 for phase, numbers in of_phase.items()}
    assert sums["held"] + sums["sampling"] == pytest.approx(0.922, rel=0.1)
    assert sums["held"] + sums["update"] == pytest.approx(measured, rel=0.1)


def lines_with_vllm(stage=3, processes=8, of=None, **settings):
    """The lines of the plan of two full agents of 7.6 B parameters, or of other ones, on H100s."""
    config = tiny_llama().config
    config.update({"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064})
    config.update({"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128})
    numbers = {"trained": 2 * 7_600_000_000, "largest": 7_600_000_000, "models": 2, **(of or {})}
    settings = {"items_per_device": 2, "max_completion_length": 256, "use_vllm": True, **settings}
    args = MAGRPOConfig("plan", bf16=True, use_cpu=True, report_to="none", **settings)
    team = size(dimensions=config, prompt=300, **numbers)
    return [*memory_lines(SimpleNamespace(training_args=args), team, stage, processes, "H100")]


def test_engines_of_vllm():
    lines = lines_with_vllm()
    assert "it does not fit: 15.2 GB of weights in an engine of 12.0 GB: raise `vllm_gpu_memory_ut" in lines[-1]
    assert "held      engines of vLLM            24.000 GB" in lines
    assert not any(line.startswith("sampling") for line in lines)
    assert lines_with_vllm(vllm_tensor_parallel_size=2)[-1].endswith("it fits")
    only = lines_with_vllm(processes=8, of={"models": 1}, vllm_gpu_memory_utilization=0.2, vllm_tensor_parallel_size=8)
    assert only[-1].endswith("it fits")
    more = lines_with_vllm(0, 1, {"trained": 1000, "models": 1}, vllm_gpu_memory_utilization=0.25)
    assert more[-1].endswith("it fits")
    server = lines_with_vllm(vllm_mode="server")
    assert server[-1].endswith("it fits") and "vLLM" not in "".join(server)
    # While the engine sleeps, the update has its memory
    lora = {"trained": 80_000_000, "base": 7_600_000_000, "base_bytes": 2.0, "models": 1}
    sums = []
    for sleeps in (False, True):
        lines = lines_with_vllm(0, 8, lora, vllm_enable_sleep_mode=sleeps, vllm_gpu_memory_utilization=0.5)
        sums.append(next(line for line in lines if "rows in a forward" in line))
        assert any(line.startswith("sampling") and "vLLM" in line for line in lines) == sleeps
    assert "8 rows" in sums[1]


@pytest.mark.parametrize(
    ("processes", "models", "parallel", "sleeps", "advice"),
    [
        (8, 2, 2, True, "fit: vLLM lets one engine of a process sleep, not 2: remove `vllm_enable_sleep_mode`"),
        (8, 1, 2, True, "it fits"),
        (8, 1, 3, False, "does not fit: `vllm_tensor_parallel_size` is 3, which does not divide the number of GPUs"),
        (8, 1, 16, False, "is 16, which does not divide the number of GPUs"),
        (1, 1, 8, False, "is 8, which does not divide the number of GPUs"),
    ],
)
def test_engines_that_vllm_would_refuse(processes, models, parallel, sleeps, advice):
    settings = {"vllm_tensor_parallel_size": parallel, "vllm_enable_sleep_mode": sleeps}
    lines = lines_with_vllm(0, processes, {"trained": 1000, "models": models}, **settings)
    assert lines[-1].endswith(advice)
    server = lines_with_vllm(0, processes, {"trained": 1000, "models": models}, vllm_mode="server", **settings)
    assert server[-1].endswith("it fits")


@pytest.mark.parametrize("common", [0, 100, 290])
@pytest.mark.parametrize("hidden_size", [32, 4096])
def test_activations_are_those_of_packed_rows(common, hidden_size):
    sequences = [[0] * common + [1 + k // 4] * (300 - common) + [50 + k] * 6 for k in range(8)]
    packed = pack(sequences, [300] * 8, 6, hidden_size)
    config = tiny_llama().config
    config.update({"hidden_size": hidden_size})
    rows = {"items_per_device": 2, "num_generations": 4, "per_device_train_batch_size": 8}
    team = size(prompt=300, common=common, dimensions=config)
    shared, alone = (
        parts(of=dataclasses.replace(team, packs=packs), **rows)["update"]["activations"] for packs in (True, False)
    )
    assert shared / alone == pytest.approx(packed["input_ids"].numel() / (8 * 306), rel=0.02)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A model, and a configuration that names it."""
    monkeypatch.chdir(tmp_path)
    tiny_llama().save_pretrained("model")
    byte_tokenizer().save_pretrained("model")
    (tmp_path / "rows.jsonl").write_text('{"x": "1"}\n{"x": "1234"}\n')
    (tmp_path / "rewards.py").write_text("def zero(completions, **columns):\n    return [0.0 for _ in completions]\n")
    settings = {"agent_model": {"name": "model"}, "dataset": {"name": "rows.jsonl"}}
    settings |= {"prompts": {"aux": "Task {x}:", "main": "{x}"}, "reward_funcs": ["rewards.zero"]}
    settings |= {"magrpo": {"max_completion_length": 6, "use_cpu": True, "bf16": False}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.syspath_prepend(str(tmp_path))


def counted(*overrides, algorithm="magrpo"):
    recipe = parse_recipe(algorithm, TASK, ["--config", "run.yaml", "--override", *overrides])
    return plan_size(recipe, recipe.make_environment(), [{"x": "1"}, {"x": "1234"}])


def test_counts_are_those_of_the_teams(files):
    number = tiny_llama().num_parameters()
    full = counted("magrpo.beta=0.1")
    assert full.packs and not counted("magrpo.max_completion_length=5000").packs
    assert (full.trained, full.frozen, full.largest) == (2 * number, 2 * number, number)  # with references
    assert (full.prompt, full.common, full.acting) == (len("Task 1234:"), len("Task 1"), 2)
    shared = counted("agent_model.share_weights=true")
    assert (shared.trained, shared.joint, full.joint) == (number, 2, 1)
    frozen = counted("magrpo.frozen_agents=[aux]")
    assert (frozen.trained, frozen.frozen) == (number, number)
    lora = counted("peft.r=4", "agent_model.torch_dtype=bfloat16", "magrpo.beta=0.1")
    recipe = parse_recipe("magrpo", TASK, ["--config", "run.yaml", "--override", "peft.r=4"])
    team = AgentTeam.from_pretrained("model", ["aux", "main"], peft_config=recipe.peft_config)
    assert lora.trained == sum(x.numel() for x in team.parameters() if x.requires_grad)
    assert (lora.base, lora.base_bytes, lora.frozen, lora.joint) == (number, 2.0, lora.trained, 2)
    one = counted("peft.r=4", "agent_model.adapter_roles=[aux]")
    assert (one.adapters, one.joint, one.trained) == (lora.adapters / 2, 1, lora.adapters / 2 + number)
    one = counted("peft.r=4", "agent_model.adapter_roles=[aux]", "magrpo.beta=0.1")  # the reference has a base, too
    assert (one.base, one.frozen) == (2 * number, one.trained)
    team.save_pretrained("team")
    saved = counted("agent_model.name=team", "magrpo.beta=0.1")
    assert (saved.trained, saved.base, saved.frozen) == (lora.trained, number, lora.trained)


def test_prompts_have_what_the_chat_template_of_their_team_gets(files):
    """A saved team's own arguments, or those of the run."""
    team = AgentTeam.from_pretrained("model", ["aux", "main"])
    long = "{% if effort is defined %}{{ 'x' * effort }}{% endif %}{% if enable_thinking is defined %}not{% endif %}"
    for tokenizer in team.tokenizers.values():
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" + long
    team.chat_template_kwargs["main"], team.reasoning["main"] = {"effort": 100}, "none"
    team.save_pretrained("team")
    saved = "agent_model.name=team"
    assert counted(saved).prompt == len("1234not") + 100
    assert counted(saved, "agent_model.reasoning=auto").prompt == len("1234") + 100
    assert counted(saved, "agent_model.chat_template_kwargs={effort: 50}").prompt == len("Task 1234:") + 50


def test_critics_are_trained_too(files, tmp_path):
    settings = yaml.safe_load((tmp_path / "run.yaml").read_text())
    settings["iac"] = settings.pop("magrpo")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    agent = tiny_llama()
    number, head = agent.num_parameters(), agent.config.hidden_size + 1
    own = agent.base_model.num_parameters() + head
    for settings, critic in (("critic_form=model", own), ("critic_form=head", head), ("critic_models=model", own)):
        assert counted(f"iac.{settings}", algorithm="iac").trained == 2 * number + 2 * critic
    lora = counted("iac.critic_form=model", "peft.r=4", algorithm="iac")
    assert lora.adapters == lora.trained - 2 * own and lora.joint == 2  # critics are not stacked
    adapter = counted("iac.critic_form=adapter", "iac.critic_lora_r=4", "peft.r=4", algorithm="iac")
    assert adapter.trained == 2 * lora.adapters + 2 * head


def test_command(files, capsys, refused):
    cli.main(
        ["plan", "--config", "run.yaml", "--task", "functions", "--gpu", "A100", "--zero", "2", "--num_gpus", "4"]
    )
    out = capsys.readouterr().out
    assert "Plan: no weights were loaded, no run was begun." in out
    assert "Each of 4 GPUs, ZeRO-2, computing in float32:" in out and "of 80 GB (A100): it fits" in out
    assert "update    4 rows in a forward, without activation checkpointing" in out
    long = ["--max_completion_length", "4000000", "--num_generations", "16"]
    cli.main(["plan", "--config", "run.yaml", "--task", "functions", "--gpu", "T4", *long])
    out = capsys.readouterr().out
    assert "\nOn one GPU, computing in float32:\n" in out and "it does not fit: see docs" in out
    cli.main(["plan", "--config", "run.yaml", "--task", "functions", "--override", "agent_model.name=org/nowhere"])
    out = capsys.readouterr().out
    assert "optimizer steps" in out and "unknown, because a model cannot be read." in out
    for argv, message in (
        (["--config", "run.yaml", "--gpu", "B52"], "choose from 'T4'"),
        (["--config", "marlhf_demo"], "not for marlhf"),
    ):
        assert message in refused(cli.main, ["plan", *argv])

"""Every kind of wrong setting ends a run with one line and exit status 2, before anything is loaded."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import write_inherited
import yaml
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from trl_multiagent import MAGRPOConfig
from trl_multiagent.configs.recipes.demo.task import TASK
from trl_multiagent.environments.yaml_task import TASK as FUNCTIONS
from trl_multiagent.runs.run import run_recipe
from trl_multiagent.settings import schema
from trl_multiagent.settings.algorithms import ALGORITHMS
from trl_multiagent.settings.derive import check_settings, make_training_args
from trl_multiagent.settings.read import ConfigError, merge, rename
from trl_multiagent.settings.schema import known_settings

from tiny import PROBLEM, byte_tokenizer, tiny_llama, tiny_task, write_problems


# Rules of this package: an algorithm other than MAGRPO, an override or more, and what the message must contain
RULES = """
magrpo.learning_rate=1e999 finite number
magrpo.discount=1.5 at most 1
magrpo.reward_scale=0 other than 0
magrpo.num_turns=60 more than 10000 joint actions
magrpo.num_generations=1 at least 2
magrpo.num_agents=3 num_agents
magrpo.per_device_train_batch_size=3;magrpo.gradient_accumulation_steps=3 whole number of rollout trees
magrpo.num_turns=2;magrpo.handoff=null;magrpo.turn_gradient_weights=[1,2] handoff
seed=-1 at least 0
magrpo.frozen_agents=[aux,main] nothing to train
magrpo.agent_learning_rates={Main: 1e-5} not a role
magrpo.optim=galore_adamw galore
magrpo.eval_strategy=steps eval_split
magrpo.eval_on_start=true `magrpo.eval_on_start` needs an evaluation set
magrpo.save_strategy=best eval_strategy
magrpo.on_cliff=stop `on_cliff` looks at the reward of evaluations
magrpo.stop_strings={main: [""]} lists of texts
magrpo.metric_for_best_model=rewrad not a metric
magrpo.generation_kwargs={temprature: 1.0} temperature
magrpo.entropy_coef=0.1 `magrpo.entropy_coef` is 0.1, which teams do not support
magrpo.per_device_train_batch_size=0 greater than 0
magrpo.fp16=true needs a GPU
external.mode=telepathy 'level_feedback'
dataset.name=null `dataset.name` is missing
dataset=[1] `dataset` is [1]; it must be a section
prompt_files.aux=nowhere.txt no such file
dataset.type=demo;dataset.name=humaneval.jsonl set it to 'demo'
dataset.train_split=test[500:600] selects none
dataset.train_split=test[oops test[oops
dataset.name=broken.jsonl is not JSON
dataset.name=fields.jsonl entry_point
magrpo.items_per_device=9 fewer than
agent_model.name=/no/such/folder no such folder
agent_model.name=org/my_model! not a valid name
agent_model.name=. config.json
agent_model.attn_implementation=flsh not supported
agent_model.lora_r=8 use_peft
agent_model.load_in_4bit=true Quantized
agent_model.tokenizer_kwargs={padding_side: right} padding_side
agent_model.tokenizer_kwargs={trust_remote_code: true};agent_model.model_kwargs={trust_remote_code: false} same setting
peft.r=0 `peft.r` or `peft.lora_r` is 0; it must be greater than 0
peft.r=4;agent_model.adapter_roles=[nobody] `agent_model.adapter_roles` names 'nobody', which is not a role
magrpo.save_steps=0 greater than 0
peft.bias=all `bias` of the adapter of every agent
peft.target_modules=[q_proj,nosuch] no effect
output.save_path=file is a file
magrpo.resume_from_checkpoint=nowhere no such folder
magrpo.push_to_hub=true;magrpo.hub_model_id=a/b/c not a valid name
magrop.top_p=0.5 did you mean `magrpo`
agent_modle.name=x `agent_model`
critic_model.name=x critics
grpo.num_turns=1 rename it, this run reads `magrpo`
output.base_dir=${nowhere.at_all} nowhere
output.base_dir=??? Missing mandatory value
reward_funcs=[a.b] `functions` is not a known setting
magrpo.use_separate_critic=true is not a known setting
magrpo.items_per_device=2;magrpo.rollout_buffer_size=2 give one
magrpo.eval_interval=4;magrpo.eval_steps=4 eval_interval
magrpo.beta=0.2;magrpo.reference_kl_enabled=true reference_kl_coef
magrpo.learning_rate=null is null; it must be a valid number
magrpo.turn_gradient_weights=[1,a] `magrpo.turn_gradient_weights` is 'a'
magrpo.collaboration_mode=centralized;magrpo.num_turns=2 `num_turns` is 2, but a model that answers for all roles
magrpo.collaboration_mode=centralized;agents=[a,b] 2 entries for 1 agents (`collaboration_mode: centr
magrpo.collaboration_mode=centralized;magrpo.frozen_agents=[aux] names 'aux', which is not a role of the task: team
external.mode=expert_edits;external.expert_model=llama model 'llama' is not known: set `external.expert_base_url`
peft.peft_type=IA3 `peft.peft_type` is not a known setting
magrpo.lr_scheduler_type=cosine_with_min_lr `lr_scheduler_type: 'cosine_with_min_lr'`
magrpo.lr_scheduler_kwargs={foo: 1} `lr_scheduler_kwargs: {'foo': 1}`: TypeError
magrpo.optim=muon one of 41 names, such as
magrpo.scale_rewards=group `advantage_normalization=True` divides
magrpo.report_to=tensorbord some of azure_ml
magrpo.deepspeed=ds.json section `magrpo`, `deepspeed: 'ds.json'`: Expected
agent_model.name=model.gguf neither a folder nor a GGUF file
agent_model.name=./no/model.gguf there is no such file
agent_model.gguf_file=model.gguf there is no such file in ./model
madpo madpo.loss_type=exo_pair a team has the losses sigmoid
marlhf marlhf.reward_training={learning_rate: -1} `marlhf.reward_training.learning_rate` is -1
marlhf marlhf.reward_training={log_level: loud} `marlhf.reward_training.log_level` is 'loud'; it must be 'detail', 'de
marlhf marlhf.reward_training={warmup_step: 1} a known setting; it has warmup_steps
marlhf marlhf.reward_peft={r: x} `marlhf.reward_peft.r` is 'x'
reward_model reward_model.log_level=loud `reward_model.log_level` is 'loud'; it must be 'detail', 'debug'
reward_model reward_model.optim_args=x `optim_args: 'x'`
marlhf marlhf.reward_training={output_dir: elsewhere} cannot be set
marlhf marlhf.reward_model_name=. a folder with none of
marlhf marlhf.rl_algorithm=maac;marlhf.critic_models=[demo,demo] has 2 models
reward_model reward_model.answer_template=Answer {text}
reward_model reward_model.chat_template_path=chat.jinja teams do not support
reward_model reward_model.model_init_kwargs={num_labels: 2} one output
reward_model reward_model.metric_for_best_model=acuracy choose one of loss, accuracy
reward_model reward_model.eval_strategy=epoch;reward_model.eval_fraction=0 eval_fraction
reward_model reward_model.preference_dataset=not_collected_yet trl-multiagent collect
.x=1 section.key=value
grpo grpo.collaboration_mode=centralized for several roles, but there is one
iac iac.use_separate_critic=false;iac.critic_form=adapter `critic_form` is 'adapter'; give one.
iac iac.critic_form=adapter needs LoRA agents
iac critics=[a/b];iac.critic_models=c/d `iac.critic_models` is 'c/d', but the critics are ['a/b']
iac critic_model.name=demo has 'demo', which the task builds
iac iac.critic_models=./nowhere `iac.critic_models` is './nowhere', but there is no such folder.
iac critics=[a/b,c/d];iac.frozen_agents=[aux] 2 models for the critics ['main']
maac critics=[a/b,c/d] 2 models for the critics ['central']
maac maac.critic_form=head set `critic_form` to 'model'
ac ac.num_agents=2 ac trains one agent; IAC trains several.
maremax maremax.advantage_mode=mean 'mean'
madpo madpo.num_turns=2 `madpo.num_turns`
madpo madpo.preference_dataset=missing There are no preferences in missing
madpo_iter madpo_iter.preference_dataset=x every round collects its preferences
marlhf marlhf.rl_algorithm=ppo `marlhf.rl_algorithm`
marlhf marlhf.reward_peft={r: 3};marlhf.reward_freeze_backbone=true remove `marlhf.reward_peft`
marlhf_iter marlhf.num_iterations=2;marlhf_iter.num_iterations=3 are the same setting
marlhf_iter madpo_iter.beta=2 the section `madpo_iter` cannot be used: rename it, this run reads `marlhf_iter`
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_model):
    """The working folder, with a data set of three items, a model, and files that cannot be used."""
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(tiny_model)
    monkeypatch.setenv("RUN_ID", "7")
    write_problems(Path("humaneval.jsonl"), 3)
    Path("broken.jsonl").write_text(Path("humaneval.jsonl").read_text() + "{\n")
    Path("fields.jsonl").write_text(json.dumps({**PROBLEM, "task_id": "T/0", "entry_point": None}) + "\n")
    Path("file").touch()
    Path("rewards.py").touch()
    config = {"agent_model": {"name": "./model"}, "dataset": {"name": "humaneval.jsonl", "type": "humaneval"}}
    Path("config.yaml").write_text(yaml.safe_dump(config))
    yield tmp_path
    unset_hf_deepspeed_config()  # of arguments that could not be made; an exception may keep it


def refusal(capsys, *argv: str, algorithm: str = "magrpo") -> str:
    """The message with which a recipe refuses its settings."""
    with pytest.raises(SystemExit) as exit_info:
        run_recipe(algorithm, TASK, ["--config", "config.yaml", *argv], prog="train")
    captured = capsys.readouterr()
    assert exit_info.value.code == 2
    lines = [line for line in captured.err.splitlines() if line and not line.startswith("train: note: ")]
    assert len(lines) == 1 and lines[0].startswith("train: error: "), captured.err
    # DeepSpeed prints the accelerator when transformers first imports it
    assert not [line for line in captured.out.splitlines() if "get_accelerator" not in line]
    return lines[0]


def no_loading(*args, **kwargs):
    pytest.fail("a model was loaded")


@pytest.mark.parametrize("rule", RULES.strip().splitlines())
def test_a_wrong_setting(folder, capsys, monkeypatch, rule):
    monkeypatch.setattr("trl_multiagent.runs.prepared.PreparedRun.load_team", no_loading)
    before = sorted(folder.rglob("*"))
    algorithm, _, rest = rule.partition(" ")
    if algorithm not in ALGORITHMS:
        algorithm, rest = "magrpo", rule
    overrides, expected = (part.replace("\0", " ") for part in rest.replace(": ", ":\0").split(" ", 1))
    overrides = overrides.split(";")
    if algorithm == "reward_model":
        overrides.insert(0, "reward_model.preference_dataset=not_collected_yet")
    assert expected in refusal(capsys, "--override", *overrides, "--dry_run", algorithm=algorithm)
    assert sorted(folder.rglob("*")) == before


# Whatever a YAML file says: it makes arguments of the trainer, or one line names the key

VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 0.5, 1e30, float("inf"), float("nan")]
VALUES += ["", " ", "text", "no", "steps", "1e-5"]
VALUES += [[], ["a"], [0], [-1], [[1]], [None], {}, {"a": 1}, {"a": -1.0}, {"a": None}, "???", "${nowhere}", 10**30]


LATE = ("dataloader_", "gradient_checkpointing_", "activation_checkpointing_", "cache_implementation")


def random_settings(algorithm: str, sections: list[str], number: int) -> list[tuple[str, str, Any]]:
    """Random values of the keys of some sections, without those that torch and transformers check when they train."""
    draw = random.Random(algorithm)
    keys = known_settings(algorithm, TINY)
    return [
        (section, key, draw.choice(VALUES))
        for section in sections
        for key in keys[section]
        for _ in range(number)
        if not key.startswith(LATE)
    ]


TINY = tiny_task(4)


@pytest.mark.parametrize(
    ("algorithm", "sections", "number"),
    [
        ("magrpo", "magrpo peft agent_model dataset evaluation output reward_processor wandb", 2),
        ("iac", "iac critic_model", 1),
        ("madpo_iter", "madpo_iter", 1),
        ("marlhf", "marlhf", 1),
    ],
)
def test_whatever_a_file_says(folder, tiny_model, capsys, algorithm, sections, number):
    accepted = []
    for section, key, value in random_settings(algorithm, sections.split(), number):
        merged = merge([{"agent_model": {"name": tiny_model}}, {section: {key: value}}])
        try:
            rename(algorithm, merged)
            settings = check_settings(algorithm, TINY, merged)
            if algorithm != "marlhf":  # whose trainer another setting chooses
                make_training_args(settings)
            accepted.append((section, key, value))
        except ConfigError as error:
            assert key in str(error) and "\n" not in str(error), (section, key, value)
    assert len(accepted) > 12


def test_arguments_of_trl_that_are_not_supported_may_be_off_or_have_their_defaults(folder, tiny_model):
    given = {"top_entropy_quantile": 1, "entropy_coef": "0e0", "steps_per_generation": 0, "generation_batch_size": ""}
    given |= {"include_for_metrics": [], "sync_ref_model": None, "fsdp": False}
    args = []
    for section in ({}, given):
        merged = {"agent_model": {"name": tiny_model}, "magrpo": {"output_dir": "run", **section}}
        args.append(make_training_args(check_settings("magrpo", TINY, merged)).to_dict())
    assert args[0] == args[1]
    MAGRPOConfig("run", **given)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"agent_model: {name: \xe9}", "utf-8"),
        (b"- a\n- b", "must hold sections"),
        (b"a: [", "not valid YAML"),
        (b"magrpo: {top_p: 1, top_p: 0.5}", "duplicate key top_p"),
        (b"magrpo: !!python/object:os.system {}", "not valid YAML"),
        (b"on: 3", "`True` is not a known setting"),
    ],
)
def test_a_wrong_file(folder, capsys, content, expected):
    Path("config.yaml").write_bytes(content)
    assert expected in refusal(capsys, "--dry_run")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--num_turn", "2"], "did you mean `magrpo.num_turns`?"),
        (["--magrpo.num_generations", "1"], "`num_generations` is 1"),
        (["--override", "magrpo.num_turns"], "section.key=value"),
        (["--dtype", "float8"], "'bfloat16'"),
        (["--model_name", "demo", "--model_name_or_path", "other"], "are the same setting"),
        (["--learning_rate", "1", "2"], "valid number"),
        (["--learning_rate", "1", "magrpo.num_turns=2"], "give it as --override magrpo.num_turns=2"),
        (["num_turns=2"], "give it as --override num_turns=2"),
        (["grpo"], "unknown argument 'grpo'; a configuration says which algorithm it is for"),
        (["--gpus", "2"], "--num_processes"),
        (["--config", "rewards.py"], "is Python; it takes a YAML file"),
    ],
)
def test_a_wrong_argument(folder, capsys, argv, expected):
    assert expected in refusal(capsys, *argv)


# Runs the scripts that its argument lists, one after the other, and says how each of them ended
PROGRAMS = """
import json, os, runpy, sys
from transformers import logging

sys.stderr.write(os.environ["TESTS_IMPORTED"])
logging.set_verbosity_warning()
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as exit:
        print("ended with", exit.code, file=sys.stderr)
"""


def test_programs_end_with_exit_status_2_and_one_line(folder, forked):
    root = Path(__file__).parents[2]
    programs = [
        ["trl_multiagent/cli.py", "train", "magrpo", "--override", "magrpo.top_p=2"],
        ["recipes/code_generation/train_grpo.py", "--frozen_agents", "nobody", "--dry_run"],
    ]
    programs = [[str(root / script), *argv, "--config", "config.yaml"] for script, *argv in programs]
    Path("programs.py").write_text(PROGRAMS)
    done = forked.run(folder / "programs.py", json.dumps(programs), cwd=folder, environment={"HOME": str(folder)})
    # And no line of another library, also not when it was imported
    lines = [line for line in done.stderr.splitlines() if not line.startswith("sandbox ")]
    assert done.stdout == "" and len(lines) == 2 * len(programs), done.stderr
    assert all(": error: " in line for line in lines[::2]) and lines[1::2] == ["ended with 2"] * len(programs)


def test_deepspeed_that_is_not_installed(folder, capsys, monkeypatch):
    monkeypatch.setattr("trl_multiagent.trainers.base.team_config.is_deepspeed_available", lambda: False)
    assert '`deepspeed` needs DeepSpeed: pip install "deepspeed>=' in refusal(
        capsys, "--deepspeed", "ds.json", "--dry_run"
    )


TEMPLATE = """{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{{ m['content'] }}{% endfor %}"""


def test_a_chat_template_that_refuses_a_system_message(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny_llama().save_pretrained("model")
    byte_tokenizer(chat_template=TEMPLATE).save_pretrained("model")
    Path("rows.jsonl").write_text('{"topic": "rain"}\n')
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "On {topic}."}]
    config = {"prompts": {"poet": "Write {topic}", "critic": chat}, "reward_funcs": ["json.dumps"]}
    config |= {"dataset": {"name": "rows.jsonl"}, "agent_model": {"name": "./model"}}
    Path("config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as exit_info:
        run_recipe("magrpo", FUNCTIONS, ["--config", "config.yaml", "--dry_run"], prog="train")
    line = capsys.readouterr().err.splitlines()[-1]
    assert exit_info.value.code == 2 and line.startswith("train: error: The chat template of agent 'critic' (")
    assert "refuses its prompt: Conversation roles must alternate" in line


def test_the_fields_of_the_configuration_classes_are_written_down():
    assert schema.INHERITED.read_text() == write_inherited.table(), "run scripts/data/write_inherited.py"


def test_a_wrong_setting_is_told_before_slow_libraries_are_imported():
    program = """
import json, sys
from trl_multiagent import cli
for command in json.loads(sys.argv[1]):
    try:
        cli.main(command)
    except SystemExit:
        print([x for x in ("torch", "transformers", "trl", "peft", "datasets", "accelerate") if x in sys.modules])
        print("---", file=sys.stderr)
"""
    training = ["train", "magrpo", "--config", "magrpo_he"]
    commands = {
        "`magrpo.num_turn` is not a known setting": [*training, "--override", "magrpo.num_turn=2"],
        "`magrpo.num_generations` is 'few'": [*training, "--override", "magrpo.num_generations=few"],
        "`peft.r`": [*training, "--override", "peft.r=-1"],
        "the section `grpo` cannot be used": [*training, "--override", "grpo.num_turns=2"],
        "'nope', but there is no such folder": [*training, "--resume_from_checkpoint", "nope"],
        "nothing can be written to /proc": [*training, "--output_dir", "/proc/x"],
        "did you mean `magrpo.learning_rate`?": ["plan", "--config", "magrpo_he", "--override", "magrpo.lr=3"],
        "'nope' is no folder of a run that tells the task": ["evaluate", "nope"],
    }
    command = [sys.executable, "-c", program, json.dumps([*commands.values()])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" * len(commands)
    for told, error in zip(commands, done.stderr.split("---\n")[:-1], strict=True):
        assert told in error, (told, error)

"""Every kind of wrong setting ends a run with one line and exit status 2, before anything is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pairs import pairs

from trl_multiagent.demo.task import TASK
from trl_multiagent.environments.functions import TASK as FUNCTIONS
from trl_multiagent.recipe.run import run_recipe
from trl_multiagent.settings.algorithms import ALGORITHMS, import_class
from trl_multiagent.settings.read import ConfigError


PROBLEM = {"task_id": "T/0", "prompt": "def f(x):\n    '''Double x.'''\n", "entry_point": "f"}
PROBLEM["test"] = "def check(candidate):\n    assert candidate(1) == 2\n"

# An override, and what the message must contain besides the setting's name
NUMBERS = """
magrpo.learning_rate=1e999 finite
magrpo.learning_rate=-1 at least 0
magrpo.learning_rate=nan expected float
magrpo.learning_rate=fast expected float
magrpo.learning_rate=true expected float
magrpo.learning_rate=1e30 at most
magrpo.learning_rate=null expected float
magrpo.agent_learning_rate=-1e-5 at least 0
magrpo.agent_learning_rates={main:-1} at least 0
magrpo.agent_learning_rates={main:1e999} finite
magrpo.agent_learning_rates={main:fast} expected
magrpo.agent_learning_rates=1e-5 expected
magrpo.discount=-1 at least 0
magrpo.discount=1.5 at most 1
magrpo.discount=-1e999 finite
magrpo.beta=-1 at least 0
magrpo.beta=1e999 finite
magrpo.beta=little expected float
magrpo.temperature=0 greater than 0
magrpo.temperature=-0.5 greater than 0
magrpo.temperature=1e999 finite
magrpo.top_p=2 at most 1
magrpo.top_p=0 greater than 0
magrpo.top_p=-0.1 greater than 0
magrpo.top_k=-1 at least 0
magrpo.top_k=2.5 expected int
magrpo.min_p=1.5 at most 1
magrpo.min_p=-1 at least 0
magrpo.repetition_penalty=0 greater than 0
magrpo.max_completion_length=0 at least 1
magrpo.max_completion_length=-8 at least 1
magrpo.max_completion_length=1.5 expected int
magrpo.max_completion_length=100000000000 at most
magrpo.per_device_train_batch_size=0 at least 1
magrpo.per_device_train_batch_size=-1 at least 1
magrpo.per_device_train_batch_size=1e400 expected int
magrpo.per_device_eval_batch_size=0 at least 1
magrpo.gradient_accumulation_steps=0 at least 1
magrpo.gradient_accumulation_steps=-2 at least 1
magrpo.items_per_device=0 at least 1
magrpo.items_per_device=-3 at least 1
magrpo.items_per_device=true expected int
magrpo.num_train_epochs=1e999 finite
magrpo.num_train_epochs=0 greater than 0
magrpo.num_train_epochs=-1 greater than 0
magrpo.max_steps=0 at least 1
magrpo.max_steps=-2 at least 1
magrpo.max_steps=1.5 expected int
magrpo.warmup_steps=-1 at least 0
magrpo.weight_decay=-0.1 at least 0
magrpo.adam_beta1=1 less than 1
magrpo.adam_beta2=-0.1 at least 0
magrpo.adam_epsilon=0 greater than 0
magrpo.max_grad_norm=-1 at least 0
magrpo.max_grad_norm=1e999 finite
magrpo.logging_steps=0 greater than 0
magrpo.logging_steps=-1 greater than 0
magrpo.save_steps=0 greater than 0
magrpo.save_total_limit=0 at least 1
magrpo.eval_steps=0 greater than 0
magrpo.eval_delay=-1 at least 0
magrpo.eval_num_samples=-2 at least 1
magrpo.eval_num_samples=0 at least 1
magrpo.eval_interval=-4 at least 0
magrpo.rollout_buffer_size=0 at least 1
magrpo.rollout_buffer_size=-1 at least 1
magrpo.reference_kl_coef=-0.1 at least 0
magrpo.early_termination_threshold=1e999 finite
magrpo.early_termination_threshold=high expected float
magrpo.reward_scale=1e999 finite
magrpo.reward_shift=-1e999 finite
magrpo.generation_token_budget=0 at least 1
magrpo.dataloader_num_workers=-1 at least 0
magrpo.dataloader_num_workers=100000 at most
magrpo.ddp_timeout=0 at least 1
magrpo.ref_model_mixup_alpha=2 at most 1
magrpo.ref_model_sync_steps=0 at least 1
magrpo.warmup_steps=1e99 at most
magrpo.reward_scale=0 other than 0
magrpo.max_completion_length=null give it a value
magrpo.max_completion_length=9999999 at most
magrpo.learning_rate=1+2j expected float
reward_processor.scale_factor=0 other than 0
sandbox.workers=1000000 at most
sandbox.check_timeout=1e300 at most
magrpo.vllm_gpu_memory_utilization=1.5 at most 1
magrpo.vllm_server_port=70000 at most
magrpo.seed=-1 at least 0
magrpo.seed=4294967296 at most
magrpo.data_seed=-1 at least 0
seed=-1 at least 0
seed=1.5 expected int
seed=99999999999999999999999 integer of 77 bits
seed=lucky expected int
reward_processor.scale_factor=1e999 finite
reward_processor.shift=much expected float
sandbox.check_timeout=1e999 finite
sandbox.check_timeout=nan expected float
sandbox.check_timeout=0 at least
sandbox.workers=0 at least 1
sandbox.memory_mb=1 at least
sandbox.max_timeouts=0 at least 1
dataset.size=0 at least 1
"""
SIZES = """
magrpo.num_turns=0 at least 1
magrpo.num_turns=-1 at least 1
magrpo.num_turns=two expected int
magrpo.num_turns=true expected int
magrpo.num_turns=100000000000 at most
magrpo.num_turns=60 4^1 + 4^2 + ... + 4^60
magrpo.num_turns=11 joint actions
magrpo.num_generations=0 at least 1
magrpo.num_generations=1 at least 2
magrpo.num_generations=100000000 is too large
magrpo.num_generations=99999999999999999999999999 too large
magrpo.num_generations=4.0 expected int
magrpo.num_generations_eval=0 at least 1
magrpo.num_agents=0 at least 1
magrpo.num_agents=3 num_agents
magrpo.num_agents=1000000000 at most
magrpo.per_device_train_batch_size=3,magrpo.gradient_accumulation_steps=1 whole number of rollout trees
"""
NAMES = """
magrpo.frozen_agents=helper no role
magrpo.frozen_agents=[aux,helper] no role
magrpo.frozen_agents=[aux,main] nothing to train
magrpo.frozen_agents=3 expected
magrpo.agent_learning_rates={helper:1e-5} no role
magrpo.agent_learning_rates={Main:1e-5} no role
magrpo.report_to=wnadb one of
magrpo.report_to=[tensorboard,wnadb] one of
magrpo.report_to=3 expected
magrpo.joint_mode=diagonal 'align'
magrpo.handoff=worst 'best'
magrpo.advantage_mode=median 'mean'
magrpo.loss_type=ppo 'luspo'
magrpo.loss_type=bnpo 'luspo'
magrpo.scale_rewards=group 'none'
magrpo.lr_scheduler_type=wavy 'cosine'
magrpo.lr_scheduler_type=cosine_with_min_lr min_lr
magrpo.lr_scheduler_kwargs={wave:1} lr_scheduler_kwargs
magrpo.optim=adamm 'adamw_torch'
magrpo.optim=galore_adamw galore
magrpo.eval_strategy=often 'steps'
magrpo.save_strategy=yes 'steps'
magrpo.logging_strategy=sometimes 'steps'
magrpo.hub_strategy=never 'end'
magrpo.log_level=loud 'debug'
magrpo.importance_sampling_level=word 'token'
magrpo.vllm_mode=remote 'colocate'
magrpo.resume_changes=maybe 'allow'
magrpo.load_best_model_at_end=true,magrpo.eval_strategy=steps,dataset.eval_split=test metric_for_best_model
magrpo.accelerator_config={colour:1} colour
magrpo.accelerator_config=nofile.json accelerator_config
magrpo.ddp_backend=ncll 'nccl'
magrpo.debug=foo `debug: 'foo'`
magrpo.optim_args=foo optim_args
magrpo.cache_implementation=foo 'static'
magrpo.activation_checkpointing_kwargs={foo:1} 'use_reentrant'
magrpo.dataloader_persistent_workers=true dataloader_num_workers
magrpo.save_strategy=best eval_strategy
magrpo.lr_scheduler_type=cosine,magrpo.lr_scheduler_kwargs={num_cycles:abc} num_cycles
magrpo.report_to=trackio not installed
magrpo.metric_for_best_model=rewrad did you mean 'reward'
magrpo.metric_for_best_model=nonsense no metric
magrpo.deepspeed=nowhere.json nowhere.json
external.mode=telepathy 'level_feedback'
external.mode=expert_edits,external.expert_model=null external.expert_model
external.expert_temperature=3 at most 2
external.expert_token_budget=0 at least 1
external.sandbox_slice=most expected
reward.type=model 'function'
reward.kind=free 'paper'
reward.collaboration=total 'static'
sandbox.min_tier=chroot 'seccomp'
wandb.resume=perhaps 'allow'
agent_model.torch_dtype=float8 'bfloat16'
agent_model.lora_task_type=SEQ_CLS 'CAUSAL_LM'
agent_model.bnb_4bit_quant_type=int4 'nf4'
dataset.type=humanevil humanevil
dataset.type=demo,dataset.name=humaneval.jsonl set it to 'demo'
"""
GENERATION = """
magrpo.generation_kwargs={temprature:1.0} temperature
magrpo.generation_kwargs={foo:1} not an argument
magrpo.generation_kwargs={do_sample:false} samples
magrpo.generation_kwargs={temperature:0.5} use `temperature`
magrpo.generation_kwargs={max_new_tokens:5} max_completion_length
magrpo.generation_kwargs={num_beams:4} samples
magrpo.generation_kwargs={num_return_sequences:2} num_generations
magrpo.generation_kwargs={eos_token_id:1} end-of-sequence
magrpo.generation_kwargs={typical_p:1e999} finite
magrpo.generation_kwargs=[1] expected
magrpo.generation_kwargs=abc must be a dict
magrpo.generation_kwargs={no_repeat_ngram_size:-3} at least 0
magrpo.generation_kwargs={typical_p:7} at most 1
magrpo.generation_kwargs={max_time:-1} greater than 0
magrpo.generation_kwargs={bad_words_ids:3} expected list
magrpo.generation_kwargs={guidance_scale:abc} expected float
magrpo.generation_kwargs={penalty_alpha:0.6} sampling
"""
NOT_SUPPORTED = """
magrpo.epsilon=-0.3 at least 0
magrpo.epsilon_high=-1 at least 0
magrpo.delta=0 greater than 0
magrpo.num_iterations=0 at least 1
magrpo.off_policy_mask_threshold=0.5 num_iterations
magrpo.steps_per_generation=2 items_per_device
magrpo.generation_batch_size=8 items_per_device
magrpo.multi_objective_aggregation=normalize_then_sum environment
magrpo.reward_weights=[1.0] environment
magrpo.entropy_coef=0.1 micro-batches
magrpo.use_liger_kernel=true forward
magrpo.fsdp=full_shard DeepSpeed
magrpo.torch_compile=true compiled
magrpo.auto_find_batch_size=true rollout
magrpo.neftune_noise_alpha=5 embedding
magrpo.label_smoothing_factor=0.1 labels
magrpo.remove_unused_columns=true columns
magrpo.use_transformers_paged=true generate
magrpo.top_entropy_quantile=0.5 micro-batches
magrpo.sapo_temperature_pos=2.0 not available
magrpo.max_tool_calling_iterations=3 tools
"""
TURNS = """
magrpo.num_turns=2,magrpo.turn_gradient_weights=[1.5] 1 entries for 2 turns
magrpo.num_turns=2,magrpo.turn_gradient_weights=[-1,1] at least 0
magrpo.num_turns=2,magrpo.turn_gradient_weights=[1,1e999] finite
magrpo.num_turns=2,magrpo.turn_gradient_weights=[1,a] expected
magrpo.num_turns=2,magrpo.turn_gradient_weights=[0,0] nothing would be learned
magrpo.num_turns=2,magrpo.handoff=null,magrpo.turn_gradient_weights=[1,2] handoff
magrpo.num_turns=3,magrpo.joint_mode=cross,magrpo.num_generations=5 5^2 + 5^4 + 5^6 = 16275 joint actions
magrpo.num_turns=2,magrpo.handoff=best,magrpo.num_generations=5001 2 x 5001^1 = 10002 joint actions
magrpo.num_turns=2,magrpo.max_joint_actions=19 4^1 + 4^2 = 20 joint actions
magrpo.max_joint_actions=0 at least 1
magrpo.max_history_length=-1 at least 0
magrpo.memory_mode=short one of 'full'
external.memory_mode=short one of 'full'
magrpo.external_previous_response=3 expected bool
external.hidden_tests=-1 at least 0
external.hidden_tests=all expected int
prompt_files.aux=nowhere.txt no such file
prompt_files.aux=Do-{task} which is not known
prompt_files.tests=nowhere.txt not a known setting
"""
MODELS = """
agent_model.name=/no/such/folder no such folder
agent_model.name=./no_such_folder no such folder
agent_model.name=../no_such_folder no such folder
agent_model.name=a/b/c no such folder
agent_model.name= blank
agent_model.name=null missing
agent_model.name=3 expected str
agent_model.name=org/my_model! not a valid name
agents=[demo] 1 entries for 2 agents
agents=[demo,demo,demo] 3 entries
agents=[demo,''] blank
agents=[demo,/no/such/folder] no such folder
agents=3 expected
agent_model.share_weights=yes expected bool
agent_model.share_weights=true,peft.r=4 choose one
agent_model.share_weights=true,agent_model.use_peft=true choose one
agent_model.use_peft=true,peft.r=4 give one
agent_model.lora_r=8 use_peft
agent_model.use_peft=true,agent_model.lora_r=0 at least 1
agent_model.use_peft=true,agent_model.lora_dropout=1 less than 1
agent_model.use_peft=true,agent_model.lora_alpha=x expected int
agent_model.load_in_4bit=true Quantized
agent_model.load_in_4bit=true,agent_model.load_in_8bit=true,agent_model.use_peft=true both true
agent_model.use_bnb_nested_quant=true load_in_4bit
agent_model.model_init_kwargs={dtype:float16} dtype
agent_model.model_init_kwargs=3 expected
magrpo.model_init_kwargs={revision:x} revision
agent_model.revision= blank
peft.r=0 at least 1
peft.r=-4 at least 1
peft.r=8.5 expected int
peft.r='8' expected int
peft.rank=8 not a known setting
peft.lora_alpha=0 at least 1
peft.lora_dropout=1.5 less than 1
peft.lora_dropout=-0.1 at least 0
peft.bias=all changes the base
peft.bias=some expected
peft.init_lora_weights=pissa one of
peft.init_lora_weights=random expected
peft.modules_to_save=3 expected
peft.target_modules=3 expected
peft.target_modules= blank
peft.use_qalora=true LoRA
peft.rank_pattern={q:0} at least 1
peft.peft_type=IA3 not a known setting
peft=4 section
peft.target_modules=[] empty
peft.target_modules=( regular expression
peft.target_modules=[nosuch] not found
peft.target_modules=[q_proj,nosuch] no effect
peft.modules_to_save=[nosuch] no module
peft.modules_to_save=[lm_head] output embeddings
peft.target_parameters=[foo] no effect
peft.exclude_modules=[all] no effect
peft.rank_pattern={nosuch:4} no effect
peft.layers_to_transform=[99],peft.target_modules=[q_proj] not found
agent_model.use_peft=true,agent_model.lora_target_modules=[nosuch] not found
agent_model.attn_implementation=flsh not supported
agent_model.model_init_kwargs={foo:1} foo
agent_model.name=. config.json
magrpo.agent_learning_rates={main:1e-5},agent_model.share_weights=true separate weights
"""
DATA = """
dataset.name=null missing
dataset.name= blank
dataset.name=nowhere/humaneval.jsonl no such file
dataset.name=rows.csv rows.csv
dataset.train_split=test[500:600] selects none
dataset.train_split=test[oops oops
dataset.train_split= blank
dataset.train_split=5 expected str
dataset.eval_split=test[9:] selects none
dataset.eval_split=[1,2] expected str
magrpo.eval_strategy=steps eval_split
magrpo.items_per_device=9 fewer than
dataset.name=broken.jsonl not a line of JSON
dataset.name=latin.jsonl UTF-8
dataset.name=empty.jsonl empty
dataset.name=fields.jsonl entry_point
dataset.name=types.jsonl must be
dataset.name=list.json list
dataset.name=surrogate.jsonl row 1: field 'prompt' has the character '\\ud800'
"""
FOLDERS = """
output.base_dir=file is a file
output.base_dir= blank
output.base_dir=3 expected str
output.base_dir=/proc/foo nothing can be created
output.save_path=/proc/foo nothing can be created
magrpo.output_dir=/proc/x nothing can be created
magrpo.hub_model_id=a/b/c/d not a valid name
magrpo.output_dir=file/below is a file
output.save_path=file,output.save_final_model=true is a file
output.save_path=,output.save_final_model=true blank
output.save_final_model=sure expected bool
magrpo.push_to_hub=true,magrpo.hub_model_id=a/b/c not a valid name
magrpo.resume_from_checkpoint=nowhere no such folder
"""
KEYS = """
magrop.x=1 did you mean `magrpo`
magrop.top_p=0.5 did you mean `magrpo`
magrpo.num_turn=2 `magrpo.num_turns`
agent_modle.name=x `agent_model`
datset.name=x `dataset`
dataset.nmae=x `dataset.name`
ouput.base_dir=x `output`
sandbx.workers=1 `sandbox`
num_turns=2 `magrpo.num_turns`
temprature=1 temperature
magrpo.zzzzzz=1 not a known setting
critic_model.name=x critics
grpo.num_turns=1 trains with `magrpo`
agent_model.lora_rank=3 `agent_model.lora_r`
output.base_dir=${nowhere.at_all} nowhere
output.base_dir=${ reference
magrpo=5 section
magrpo=[1] section
agent_model=[a] section
output.base_dir=??? missing value
reward_funcs=[a.b] task: functions
agent_model.temprature=1 `agent_model.temperature`
magrpo.agent_learning_rates={aux:-1} for 'aux'
wandb=on section
reward=[1] section
"""
CASES = [
    (group, *line.split(" ", 1))
    for group, lines in {
        "numbers": NUMBERS,
        "sizes": SIZES,
        "names": NAMES,
        "generation": GENERATION,
        "not supported": NOT_SUPPORTED,
        "turns": TURNS,
        "models": MODELS,
        "data": DATA,
        "folders": FOLDERS,
        "keys": KEYS,
    }.items()
    for line in lines.strip().splitlines()
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a data set of three items and files that cannot be used."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN_ID", "7")
    row = json.dumps(PROBLEM) + "\n"
    Path("humaneval.jsonl").write_text("".join(json.dumps({**PROBLEM, "task_id": f"T/{k}"}) + "\n" for k in range(3)))
    Path("broken.jsonl").write_text(row + "{\n")
    Path("latin.jsonl").write_bytes(row.replace("Double", "Dóuble").encode("latin-1").replace(b"\\u00f3", b"\xf3"))
    Path("empty.jsonl").write_text("")
    Path("fields.jsonl").write_text(json.dumps({**PROBLEM, "entry_point": None}) + "\n")
    Path("types.jsonl").write_text(json.dumps({**PROBLEM, "prompt": 3}) + "\n")
    Path("surrogate.jsonl").write_text(json.dumps({**PROBLEM, "prompt": "\ud800"}) + "\n")
    Path("list.json").write_text('{"a": 1}')
    Path("rows.csv").write_text("a,b\n1,2\n")
    Path("file").touch()
    config = {"agent_model": {"name": "demo"}, "dataset": {"name": "humaneval.jsonl", "type": "humaneval"}}
    Path("config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def refusal(capsys, *argv: str) -> str:
    """The message with which a recipe refuses its settings."""
    with pytest.raises(SystemExit) as exit_info:
        run_recipe("magrpo", TASK, ["--config", "config.yaml", *argv], prog="train")
    captured = capsys.readouterr()
    assert exit_info.value.code == 2
    others = ("train: note: ", "Building the base model")  # the first test that needs the demo's model builds it
    lines = [line for line in captured.err.splitlines() if line and not line.startswith(others)]
    assert len(lines) == 1 and lines[0].startswith("train: error: "), captured.err
    assert not captured.out
    return lines[0]


def no_loading(*args, **kwargs):
    pytest.fail("a model was loaded")


@pytest.mark.parametrize(("group", "overrides", "expected"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_wrong_setting(folder, capsys, monkeypatch, group, overrides, expected):
    monkeypatch.setattr("trl_multiagent.recipe.recipe.Recipe.load_team", no_loading)
    before = sorted(folder.rglob("*"))
    # Commas within brackets belong to a value
    parts = ["".join(part) for part in overrides.replace(",magrpo.", "\0magrpo.").split("\0")]
    for section in ("dataset", "agent_model", "output", "peft", "external"):
        parts = [piece for part in parts for piece in part.replace(f",{section}.", f"\0{section}.").split("\0")]
    parts = [part.replace(":", ": ") if "={" in part else part for part in parts]
    planned = refusal(capsys, "--override", *parts, "--dry_run")
    assert expected in planned
    if group not in ("data", "keys"):
        names = [part.partition("=")[0].rpartition(".")[2].replace("_", "") for part in parts]
        assert any(name in planned.replace("_", "").lower() for name in names)
    if group in ("sizes", "data", "folders"):  # the same without --dry_run
        assert refusal(capsys, "--override", *parts) == planned
    assert sorted(folder.rglob("*")) == before


def test_there_are_enough_cases():
    assert len(CASES) >= 150 and len({overrides for _, overrides, _ in CASES}) == len(CASES)


# An algorithm, one or more overrides, and what the message must contain
OTHER_ALGORITHMS = """
iac critics=[demo,demo,demo] the task builds
iac iac.critic_models=[demo,demo,demo] the task builds
iac iac.train_batch_size=0 at least 1
iac iac.router_aux_loss_coef=-1 at least 0
maac critics=[demo,demo] the task builds
madpo madpo.label_smoothing=0.7 less than 0.5
madpo madpo.label_smoothing=-0.1 at least 0
madpo madpo.label_smoothing_factor=0.1 `label_smoothing`
madpo madpo.loss_type=exo_pair label_smoothing
madpo madpo.loss_type=sppo_hard;madpo.f_divergence_type=js_divergence goes with
madpo madpo.f_divergence_type=tv 'reverse_kl'
madpo madpo.discopop_tau=0 greater than 0
madpo madpo.max_length=0 at least 1
madpo madpo.pad_to_multiple_of=0 at least 1
madpo madpo.dataset_num_proc=0 at least 1
madpo madpo.precompute_ref_batch_size=0 at least 1
madpo madpo.ref_model_mixup_alpha=2 at most 1
madpo madpo.ref_model_sync_steps=0 at least 1
madpo madpo.beta=1e300 at most
madpo madpo.min_p=2 at most 1
madpo madpo.repetition_penalty=0 greater than 0
madpo madpo.reward_scale=0 other than 0
madpo madpo.reward_scale=1e300 at most
madpo madpo.train_batch_size=0 at least 1
madpo madpo.train_sampling_strategy=sorted 'random'
madpo madpo.include_num_input_tokens_seen=some 'all'
madpo madpo.gradient_checkpointing_kwargs=fast must be a mapping
madpo madpo.gradient_checkpointing_kwargs={use_reentrant: maybe} true or false
madpo madpo.preference_num_candidates=1 at least 2
madpo madpo.preference_num_candidates=1000000000000000000 at most
madpo madpo.comparator_policy=model;madpo.comparator_model_name=/no/such/model no such folder
madpo_iter madpo=3 must be a section
madpo_iter madpo=[a] must be a section
marlhf marlhf.reward_model_name=/no/such/model no such folder
marlhf marlhf.reward_model_name=org/my_model! not a valid name
marlhf marlhf.reward_training={learning_rate: -1} at least 0
marlhf marlhf.reward_training={output_dir: elsewhere} folder of the run
marlhf marlhf.reward_training={prompt_template: Do} {text}
marlhf marlhf.rl_algorithm=maac;marlhf.critic_models=[demo,demo] has 2 models
reward_model reward_model.learning_rate=-1 at least 0
reward_model reward_model.learning_rate=1e300 at most
reward_model reward_model.num_train_epochs=-1 greater than 0
reward_model reward_model.per_device_train_batch_size=0 at least 1
reward_model reward_model.max_steps=0 at least 1
reward_model reward_model.seed=-1 at least 0
reward_model reward_model.report_to=wnadb one of
reward_model reward_model.report_to=trackio not installed
reward_model reward_model.log_level=loud 'debug'
reward_model reward_model.lr_scheduler_kwargs={wave: 1} lr_scheduler_kwargs
reward_model reward_model.optim_args=foo optim_args
reward_model reward_model.fsdp=full_shard DeepSpeed
reward_model reward_model.fp16=true needs a GPU
reward_model reward_model.answer_template=Answer {text}
reward_model reward_model.center_rewards_coefficient=-1 at least 0
reward_model reward_model.push_to_hub=true;reward_model.hub_model_id=a/b/c not a valid name
reward_model reward_model.output_dir=file/below is a file
reward_model agent_model.name=org/my_model! not a valid name
reward_model agent_model.name=model;reward_model.eos_token=nothing no token of the tokenizer
reward_model agent_model.name=model;reward_model.pad_token=nothing no token of the tokenizer
reward_model reward_model.chat_template_path=chat.jinja `prompt_template`
reward_model agent_model.name=model;reward_model.model_init_kwargs={foo: 1} unexpected keyword argument 'foo'
reward_model reward_model.model_init_kwargs={num_labels: 2} one output
reward_model reward_model.model_init_kwargs=fast expected dict
reward_model agent_model.name=model;agent_model.attn_implementation=flsh cannot be loaded
reward_model agent_model.load_in_8bit=true;peft.r=4 8bit
reward_model reward_model.metric_for_best_model=acuracy choose one of loss, accuracy
reward_model reward_model.eval_strategy=epoch;reward_model.eval_fraction=0 eval_fraction
reward_model reward_model.preference_dataset=/no/such.jsonl no file /no/such.jsonl
reward_model reward_model.preference_dataset=/no/folder no folder /no/folder
reward_model reward_model.preference_dataset=not_collected_yet trl-multiagent collect
reward_model reward_model.preference_dataset=org/name reach 'org/name'
marlhf marlhf.reward_model_name=model;marlhf.reward_training={eos_token: nothing} no token of the tokenizer
marlhf marlhf.reward_training={metric_for_best_model: x} no metric
magrpo evaluation.baseline_model=/no/such/model no such folder
magrpo evaluation.seed=99999999999999 at most
magrpo evaluation.num_episodes=1000000000000 at most
magrpo magrpo.reward_shift=1e300 at most
magrpo magrpo.chat_template_kwargs=nonsense must be a dict
magrpo magrpo.fp16=true needs a GPU
magrpo agent_model.bnb_4bit_quant_storage=foo 'bfloat16'
magrpo .x=1 section.key=value
"""


@pytest.mark.parametrize("case", OTHER_ALGORITHMS.strip().splitlines())
def test_a_wrong_setting_of_another_algorithm(folder, tiny_model, capsys, monkeypatch, case):
    Path("model").symlink_to(tiny_model)
    monkeypatch.setattr("trl_multiagent.recipe.recipe.Recipe.load_team", no_loading)
    algorithm, rest = case.split(" ", 1)
    overrides, expected = rest.replace(": ", ":\0").split(" ", 1)
    overrides = [override.replace("\0", " ") for override in overrides.split(";")]
    if algorithm == "reward_model":
        overrides.insert(0, "reward_model.preference_dataset=not_collected_yet")
    with pytest.raises(SystemExit) as exit_info:
        argv = ["--config", "config.yaml", "--override", *overrides, "--dry_run"]
        import_class(ALGORITHMS[algorithm].run)(algorithm, TASK, argv, prog="train")
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if not line.startswith("train: note: ")]
    assert exit_info.value.code == 2 and len(lines) == 1 and expected in lines[0], error


@pytest.mark.parametrize(
    ("algorithm", "overrides", "expected"),
    [
        ("magrpo", ["dataset.name=demo"], "dataset.type (`dataset.name` is 'demo'"),
        ("madpo", ["madpo.advantage_mode=mean"], "madpo.advantage_mode (the loss compares pairs)"),
        ("marlhf", ["marlhf.critic_form=head"], "because of `rl_algorithm`: marlhf.critic_form"),
        ("reward_model", ["agent_model.share_weights=true"], "agent_model.share_weights"),
        ("reward_model", ["reward_model.eval_num_samples=3"], "reward_model.eval_num_samples"),
        ("magrpo", ["output.save_final_model=false", "magrpo.push_to_hub=true"], "`output.save_final_model: false`"),
    ],
)
def test_a_setting_without_effect_is_noted(folder, capsys, algorithm, overrides, expected):
    if algorithm == "reward_model":
        pairs().save_to_disk("collected")
        overrides = [*overrides, "reward_model.preference_dataset=collected"]
    argv = ["--config", "config.yaml", "--override", *overrides, "--dry_run"]
    import_class(ALGORITHMS[algorithm].run)(algorithm, TASK, argv, prog="train")
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train: note: ")]
    assert any(expected in note for note in notes), notes


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"agent_model: {name: \xe9}", "not UTF-8"),
        (b"- a\n- b", "must hold sections"),
        (b"a: [", "not valid YAML"),
        (b"magrpo: [1, 2]", "`magrpo` is [1, 2], it must be a section"),
        (b"dataset: humaneval", "`dataset` is 'humaneval', it must be a section"),
        (b"agent_model: 3", "`agent_model` is 3, it must be a section"),
        (b"magrpo: {top_p: 1, top_p: 0.5}", "duplicate key top_p"),
        (b"magrpo: !!python/object:os.system {}", "not valid YAML"),
        (b"magrpo: {num_turns: .inf}", "expected int"),
        (b"magrpo: {learning_rate: .nan}", "finite"),
        (b"3", "sections"),
        (b"3: 4", "the key 3"),
        (b"on: 3", "the key True"),
        (b"null: {a: 1}", "not valid YAML"),
    ],
)
def test_a_wrong_file(folder, capsys, content, expected):
    Path("config.yaml").write_bytes(content)
    assert expected in refusal(capsys, "--dry_run")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--num_turn", "2"], "did you mean `--num_turns`?"),
        (["--override", "magrpo.num_turns"], "section.key=value"),
        (["--override", "=2"], "section.key=value"),
        (["--temperature", "0"], "`magrpo.temperature`"),
        (["--lora_r", "8"], "use_peft"),
        (["--dtype", "float8"], "'bfloat16'"),
        (["--model_name", "demo", "--model_name_or_path", "other"], "are the same setting"),
        (["--learning_rate", "1", "2"], "expected float"),
    ],
)
def test_a_wrong_argument(folder, capsys, argv, expected):
    assert expected in refusal(capsys, *argv)


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (["-m", "trl_multiagent.cli", "train", "magrpo"], ["--override", "magrpo.top_p=2"]),
        (["-m", "trl_multiagent.cli", "run", "marloo"], ["--override", "marloo.advantage_mode=mean"]),
        (["recipes/code_generation/train_magrpo.py"], ["--num_generations", "100000000", "--dry_run"]),
        (["recipes/code_generation/train_grpo.py"], ["--frozen_agents", "nobody", "--dry_run"]),
    ],
)
def test_a_program_ends_with_exit_status_2_and_one_line(folder, command, argv):
    root = Path(__file__).parents[2]
    command = [str(root / part) if part.endswith(".py") else part for part in command]
    done = subprocess.run(
        [sys.executable, *command, "--config", "config.yaml", *argv],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "HOME": str(folder)},
    )
    assert done.returncode == 2, done.stderr
    *before, last = done.stderr.splitlines()
    assert done.stdout == "" and ": error: " in last
    assert all(line.startswith("sandbox ") for line in before), before  # no line of another library


def test_one_exception_from_python():
    from trl_multiagent import MAGRPOConfig
    from trl_multiagent.settings.derive import check_settings

    settings = {"agent_model": {"name": "demo"}, "dataset": {"name": "demo"}, "magrpo": {"top_p": 2}}
    with pytest.raises(ConfigError, match=r"`magrpo.top_p` or .* is 2, it must be greater than 0 and at most 1\."):
        check_settings("magrpo", TASK, settings)
    for arguments, message in {
        ("top_p", 2): r"`top_p` is 2, it must be greater than 0 and at most 1\.",
        ("learning_rate", float("inf")): r"`learning_rate` is inf, it must be a finite number\.",
        ("num_turns", "two"): r"`num_turns` is 'two', it must be at least 1",
        ("num_turns", 1.5): r"`num_turns` is 1.5, it must be an integer\.",
        ("num_turns", True): r"`num_turns` is True, it must be at least 1",
        ("entropy_coef", 0.3): r"`entropy_coef` is 0.3, which is not supported: it depends on",
        (
            "agent_learning_rates",
            (("main", -1.0),),
        ): r"`agent_learning_rates` is -1.0 for 'main', it must be at least 0",
    }.items():
        name, value = arguments
        with pytest.raises(ValueError, match=message):
            MAGRPOConfig("out", **{name: dict(value) if isinstance(value, tuple) else value})


@pytest.mark.parametrize(
    ("rows", "override", "expected"),
    [
        ('{"topic": "a"}\n{"topic": [1]}', "seed=1", "row 2: field `topic` is a list"),
        ('{"topic": "a"}\n{"topic": null}', "seed=1", "row 2: field `topic` is missing or null"),
        ('{"topic": "a"}', "magrpo.num_turns=2", "no `transition`"),
        ('{"topic": "a"}', "reward_funcs=[json.__doc__]", "`functions.reward_funcs` names 'json.__doc__'"),
    ],
)
def test_a_wrong_task_of_functions(tmp_path, monkeypatch, capsys, rows, override, expected):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(rows)
    config = {"prompts": {"poet": "Write {topic}"}, "reward_funcs": ["json.dumps"], "dataset": {"name": "rows.jsonl"}}
    Path("config.yaml").write_text(yaml.safe_dump({**config, "agent_model": {"name": "org/model"}}))
    with pytest.raises(SystemExit) as exit_info:
        run_recipe("magrpo", FUNCTIONS, ["--config", "config.yaml", "--override", override, "--dry_run"], prog="train")
    error = capsys.readouterr().err
    assert exit_info.value.code == 2 and expected in error and error.count("\n") == 1


def test_a_blank_name_beside_agents_is_accepted(folder, capsys):
    overrides = ["agent_model.name=", "agents=[org/a,org/b]"]
    run_recipe("magrpo", TASK, ["--config", "config.yaml", "--override", *overrides, "--dry_run"], prog="train")
    assert "aux: org/a" in capsys.readouterr().out

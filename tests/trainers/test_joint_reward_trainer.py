"""The joint reward model: its text, its training, what is reported, and its use as a reward function."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from datasets import Dataset
from pairs import pair_config, pairs
from peft import LoraConfig
from transformers import (
    AutoModelForSequenceClassification,
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    LlamaForSequenceClassification,
)
from trl import RewardConfig, RewardTrainer

from trl_multiagent import FunctionEnvironment, JointRewardConfig, JointRewardTrainer
from trl_multiagent.environments.reward_models import JointRewardModel
from trl_multiagent.models.joint_text import JointText
from trl_multiagent.preferences.rows import text_columns
from trl_multiagent.trainers.joint_reward_trainer import run_ends, split_by_item

from by_hand import distance
from pages import read_page
from tiny import SIZE, byte_tokenizer, tiny_classifier


def reward_trainer(folder, answered_by=("aux", "main"), model=None, **arguments):
    own = {name: arguments.pop(name) for name in ("eval_dataset", "peft_config", "roles") if name in arguments}
    dataset = arguments.pop("train_dataset", None)
    dataset = pairs(answered_by) if dataset is None else dataset
    args, model = pair_config(folder, JointRewardConfig, **arguments), tiny_classifier() if model is None else model
    return JointRewardTrainer(model, args, dataset, processing_class=byte_tokenizer(), **own)


def score(model, ids):
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits.item()


# The text


def test_text():
    text = JointText(("aux", "main"))
    prompts = {"main": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write."}]}
    prompts["aux"] = "Help with {text}."
    answers = {"main": [{"role": "assistant", "content": "g()"}], "aux": "f()"}
    whole = (
        "### Prompt of aux\nHelp with {text}.\n\n### Prompt of main\nBe brief.\n\nWrite.\n\n"
        "### Answer of aux\nf()\n\n### Answer of main\ng()\n\n"
    )
    assert text.text(prompts, answers) == whole
    assert JointText.from_config(json.loads(json.dumps(asdict(text)))) == text
    ids, is_cut = text.encode(byte_tokenizer(), prompts, answers)
    assert (ids, is_cut) == (byte_tokenizer()(whole + "<eos>")["input_ids"], False)
    with pytest.raises(ValueError, match=r"must contain {text} once"):
        JointRewardConfig("judge", prompt_template="{role}")


@pytest.mark.parametrize("length", [30, 60, 100, 109, 110, 139, 140, 141])
def test_a_long_text_loses_a_part_of_the_problem_only(length):
    text = JointText(("a", "b"), "<{role}>{text}", "[{role}]{text}", max_length=length)
    prompts, answers = {"a": "p" * 20, "b": "q" * 80}, {"a": "x" * 13, "b": "yz" * 6}
    ids, is_cut = text.encode(byte_tokenizer(), prompts, answers)
    string = byte_tokenizer().decode(ids)
    assert string.endswith("[a]" + answers["a"] + "[b]" + answers["b"] + "<eos>")
    assert is_cut == (length < 100 + 25 + 12 + 1)  # the prompts, the answers, the marks and the end
    if is_cut and length >= 38:
        assert len(ids) == length or string.count("p") == string.count("q")  # all of it is used, or both are cut
    if length == 30:  # too short for the answers: they stay whole
        assert len(ids) == 38
    elif length == 109:
        assert string.count("p") == 20 and string.count("q") == 51  # the longest prompt is cut first


# Training


@pytest.mark.parametrize("roles", [("aux", "main"), ("solo",)])
def test_losses_are_those_of_trl_on_the_same_texts(tmp_path, roles):
    data, text, tokenizer = pairs(roles), JointText(roles, max_length=2048), byte_tokenizer()
    plain = {"optim": "sgd", "learning_rate": 0.1}  # Adam turns the rounding of a gradient near 0 into a whole step
    ours = reward_trainer(tmp_path / "ours", roles, tiny_classifier(), eval_fraction=0.0, **plain)
    ours.train()

    def joint(row, side):
        columns = {role: text_columns(role) for role in roles}
        prompts = {role: row[names[0]] for role, names in columns.items()}
        return text.text(prompts, {role: row[names[side]] for role, names in columns.items()})

    texts = Dataset.from_list([{"chosen": joint(row, 1), "rejected": joint(row, 2)} for row in data])
    args = pair_config(tmp_path / "trl", RewardConfig, **plain)
    theirs = RewardTrainer(tiny_classifier(), args, train_dataset=texts, processing_class=tokenizer)
    theirs.train()
    losses = [[log["loss"] for log in trainer.state.log_history if "loss" in log] for trainer in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(set(losses[0])) == 3
    before = tiny_classifier().state_dict()
    updates = [{name: x - before[name] for name, x in y.model.state_dict().items()} for y in (ours, theirs)]
    assert distance(*updates) < 1e-4


@pytest.mark.parametrize("pad_token_id", [257, 256])  # one of its own, and that which ends the texts
def test_pairs_share_their_prompts(tmp_path, pad_token_id):
    trainer = reward_trainer(tmp_path, eval_fraction=0.0)
    model = trainer.model
    model.config.pad_token_id = pad_token_id
    rows = [trainer.train_dataset[k] for k in range(3)]
    batch = trainer.data_collator(rows)
    assert batch["packed"]["input_ids"].numel() < 0.8 * batch["input_ids"].numel()
    gradients = []
    for own in (False, True):
        model.zero_grad()
        if own:
            sequences = [row[name] for name in ("chosen_ids", "rejected_ids") for row in rows]
            scores = torch.cat([model(torch.tensor([ids])).logits for ids in sequences])
        else:
            scores = run_ends(model, model.base_model, **batch["packed"]).logits
        (scores.squeeze(-1) * torch.arange(6.0)).sum().backward()
        gradients.append({name: x.grad.clone() for name, x in model.named_parameters()} | {"scores": scores.detach()})
    assert distance(*gradients) < 1e-5


def test_models_that_read_the_whole_text_do_not_share_prompts(tmp_path):
    size = {**SIZE, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16, "num_labels": 1}
    size |= {"layer_types": ["sliding_attention", "full_attention"]}
    for both_ways in (False, True):
        config = Gemma3TextConfig(**size, use_bidirectional_attention=both_ways)
        trainer = reward_trainer(tmp_path, model=Gemma3TextForSequenceClassification(config), eval_fraction=0.0)
        assert ("packed" in trainer.data_collator([trainer.train_dataset[0]])) == (not both_ways)

    class OfTheFirstToken(LlamaForSequenceClassification):
        def forward(self, input_ids, attention_mask, use_cache=False):
            return self.score(self.model(input_ids, attention_mask=attention_mask).last_hidden_state[:, 0])

    trainer = reward_trainer(tmp_path, model=OfTheFirstToken(tiny_classifier().config), eval_fraction=0.0)
    assert "packed" not in trainer.data_collator([trainer.train_dataset[0]])


@pytest.mark.parametrize("start", [2, 4])  # in the middle of an epoch and of a log's interval, and after the last step
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, start, reports):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3}
    settings |= {"eval_strategy": "steps", "eval_steps": 2}
    whole = reward_trainer(tmp_path / "run", **settings)
    whole.train()
    resumed = reward_trainer(tmp_path / "run", model=tiny_classifier(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{start}"))
    assert resumed.state.global_step == 4
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)

    def entries(trainer):
        ignored = ("_runtime", "_per_second")
        return [{k: v for k, v in log.items() if not k.endswith(ignored)} for log in trainer.state.log_history]

    for other in ({"seed": 2}, {"center_rewards_coefficient": 0.5}, {"train_dataset": pairs(number=5)}):
        another = reward_trainer(tmp_path / "run", model=tiny_classifier(), **{**settings, **other})
        with pytest.raises(ValueError, match=f"checkpoint of another run: {next(iter(other))}"):
            another.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{start}"))

    assert entries(resumed) == entries(whole) and {"num_tokens", "margin"} <= entries(resumed)[1].keys()
    config = json.loads((tmp_path / "run" / "checkpoint-2" / "config.json").read_text())
    assert JointText.from_config(config["joint_text"]) == whole.joint_text
    page = read_page(tmp_path / "run" / "report.html")
    assert page["facts"]["algorithm"] == "Joint reward model" and page["metrics"]["loss"][0]["step"]


def test_a_file_of_weights_is_read_from_its_conversion(tmp_path, monkeypatch):
    tiny_classifier().save_pretrained(tmp_path / "converted")
    module = "trl_multiagent.trainers.joint_reward_trainer.converted"
    monkeypatch.setattr(module, lambda name: str(tmp_path / "converted") if name == "model.gguf" else name)
    assert reward_trainer(tmp_path, model="model.gguf").model.config.vocab_size == tiny_classifier().config.vocab_size


def test_several_sets_are_evaluated(tmp_path):
    trainer = reward_trainer(tmp_path, eval_dataset={"a": pairs(number=2), "b": pairs(number=3)})
    assert {"eval_a_loss", "eval_b_accuracy"} <= trainer.evaluate().keys()
    metrics = trainer.evaluate(pairs(number=2), metric_key_prefix="test")
    assert metrics["test_accuracy"] >= 0.0 and not [name for name in metrics if name.startswith("eval_")]


def test_a_frozen_backbone(tmp_path):
    trainer = reward_trainer(tmp_path, freeze_backbone=True)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    changed = [name for name, x in trainer.model.named_parameters() if not torch.equal(x, before[name])]
    assert changed == ["score.weight"]
    with pytest.raises(ValueError, match=r"contradicts `peft_config`"):
        reward_trainer(tmp_path, freeze_backbone=True, peft_config=LoraConfig())


def test_wrong_arguments(tmp_path):
    with pytest.raises(TypeError, match="got `list`"):
        reward_trainer(tmp_path, train_dataset=[])
    with pytest.raises(ValueError, match="no column 'critic_prompt'"):
        reward_trainer(tmp_path, roles=["critic"])
    with pytest.raises(ValueError, match=r"`eval_fraction` is 1\.0"):
        reward_trainer(tmp_path, eval_fraction=1.0)
    trainer = reward_trainer(tmp_path, eval_fraction=0.0)
    with pytest.raises(ValueError, match="no held-out pairs"):
        trainer.report()


# Held-out pairs


def test_pairs_are_held_out_by_item():
    data = Dataset.from_list([{**row, "item_id": k // 3} for k, row in enumerate(pairs(number=12))])
    train, held_out = split_by_item(data, ["aux", "main"], 0.5, seed=1)
    assert not set(train["item_id"]) & set(held_out["item_id"]) and len(held_out) == 6
    assert split_by_item(data, ["aux", "main"], 0.5, seed=1)[1]["item_id"] == held_out["item_id"]
    for fraction in (0.01, 0.9, 0.99):  # there is an item on both sides
        assert all(len(set(side["item_id"])) >= 1 for side in split_by_item(data, ["aux", "main"], fraction, seed=1))
    unknown = data.remove_columns("item_id")  # other prompts are other items
    assert [len(side) for side in split_by_item(unknown, ["aux", "main"], 0.25, seed=1)] == [9, 3]
    same = data.remove_columns("item_id").select([0, 0, 0, 1])  # without ids, equal prompts are one item
    assert {len(part) for part in split_by_item(same, ["aux", "main"], 0.1, seed=0)} == {1, 3}
    assert split_by_item(data.select(range(3)), ["aux"], 0.5, seed=0)[1] is None


def test_report(tmp_path, reports):
    trainer = reward_trainer(tmp_path, eval_dataset=pairs(number=7), per_device_eval_batch_size=2, max_length=60)
    trainer.train()
    facts = trainer.report()
    model, text = trainer.model, trainer.joint_text
    scores = {"chosen": [], "rejected": []}
    for row in pairs(number=7):
        for side, ids in scores.items():
            answers = {role: row[f"{role}_{side}"] for role in text.roles}
            prompts = {role: row[f"{role}_prompt"] for role in text.roles}
            ids.append(score(model, text.encode(byte_tokenizer(), prompts, answers)[0]))
    margins = np.subtract(scores["chosen"], scores["rejected"])
    assert facts["accuracy"] == np.mean(margins > 0) and facts["margin"] == pytest.approx(margins.mean(), abs=1e-5)
    assert facts["texts_cut"] == {"train": 24, "eval": 14}
    logged = trainer.evaluate()
    assert logged["eval_loss"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), abs=1e-5)
    extremes = (logged["eval_min_reward"], logged["eval_max_reward"])
    assert extremes == pytest.approx((min(map(min, scores.values())), max(map(max, scores.values()))), abs=1e-5)
    assert logged["eval_accuracy"] == facts["accuracy"]
    assert json.loads((tmp_path / "held_out.json").read_text())["pairs"] == 7
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert f'pipeline(model="{tmp_path}"' in card  # the folder, until there is a repository


# Use


@pytest.mark.parametrize("form", ["full", "lora"])
def test_the_saved_model_is_an_ordinary_one_and_a_reward_function(tmp_path, form):
    peft = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if form == "lora" else {}
    trainer = reward_trainer(tmp_path, save_strategy="steps", save_steps=3, **peft)
    trainer.train()
    trainer.report()
    trainer.save_model()
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (tmp_path / "checkpoint-3" / "adapter_config.json").is_file() == (form == "lora")

    prompts = {"aux": "Help with {x}.", "main": "Do {x}."}
    environment = FunctionEnvironment(prompts, str(tmp_path), reward_weights=[2.0])
    actions = [{"aux": "f", "main": "g" * 9}, {"aux": "", "main": "h"}]
    outcomes = environment.score([{"x": "1"}, {"x": "2"}], actions, [(), ()])
    for k, outcome in enumerate(outcomes):
        of_item = {role: prompt.format(x=k + 1) for role, prompt in prompts.items()}
        ids, _ = trainer.joint_text.encode(byte_tokenizer(), of_item, actions[k])
        assert outcome.reward == pytest.approx(2 * score(loaded, ids), abs=1e-5)
        assert score(trainer.model, ids) == pytest.approx(score(loaded, ids), abs=1e-5)
    with pytest.raises(ValueError, match=r"trained on answers of \['aux', 'main'\], but the roles are \['main'"):
        FunctionEnvironment({"main": "", "aux": ""}, loaded)


def test_with_one_role_it_is_a_reward_function_of_trl(tmp_path):
    trainer = reward_trainer(tmp_path, ("solo",))
    trainer.save_model()
    reward = JointRewardModel(str(tmp_path))
    ids, _ = trainer.joint_text.encode(byte_tokenizer(), {"solo": "Write."}, {"solo": "rain"})
    expected = pytest.approx(score(trainer.model, ids), abs=1e-5)
    messages = [[{"role": "user", "content": "Write."}]], [[{"role": "assistant", "content": "rain"}]]
    assert reward(prompts=["Write."], completions=["rain"], trainer_state=None) == [expected]
    assert reward(prompts=messages[0], completions=messages[1]) == [expected]
    with pytest.raises(ValueError, match="is not a joint reward model"):
        JointRewardModel(tiny_classifier(), byte_tokenizer())

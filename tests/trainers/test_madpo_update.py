"""MADPO's update: against plain PyTorch, against TRL's DPO for one agent, and whatever the micro-batches are."""

import copy

import pytest
import torch
import torch.nn.functional as F
from pairs import Shift, pair_config, pair_trainer, pairs, shift
from trl import DPOConfig, DPOTrainer

from trl_multiagent.preferences.rows import text_columns
from trl_multiagent.trainers.madpo_config import LOSS_TYPES

from by_hand import CHECKPOINTING, Gradients, distance, log_probability
from tiny import byte_tokenizer, team_of, tiny_experts, tiny_llama, tiny_team


def one_update(folder, team, callbacks=(), **settings):
    """The gradients of one optimizer step, and its log."""
    gradients = Gradients()
    settings = {"max_steps": 1, "per_device_train_batch_size": 6, "train_dataset": pairs(team.roles, 6), **settings}
    trainer = pair_trainer(folder, team, callbacks=[*callbacks, gradients], **settings)
    trainer.train()
    return gradients.of, trainer.state.log_history[0]


def answer_logps(team, role, row, side):
    tokenizer = team.tokenizers[role]
    prompt, answer = tokenizer(row[f"{role}_prompt"])["input_ids"], tokenizer(row[f"{role}_{side}"])["input_ids"]
    with team.activate(role) as model:
        return log_probability(model, prompt, [*answer, tokenizer.eos_token_id])


def log_ratios(team, reference, row):
    """d_i of every agent."""
    d = {}
    for role in team.roles:
        d[role] = answer_logps(team, role, row, "chosen").sum() - answer_logps(team, role, row, "rejected").sum()
        if reference is not None:
            with torch.no_grad():
                chosen, rejected = (answer_logps(reference, role, row, side).sum() for side in ("chosen", "rejected"))
            d[role] = d[role] - (chosen - rejected)
    return d


def factorised_gradients(team, reference, rows, beta):
    """For every agent alone: -log sigmoid(beta * (d_i + d_k)), the other agents' d_k being numbers."""
    total = 0.0
    for row in rows:
        values = {role: d.item() for role, d in log_ratios(team, reference, row).items()}
        for role, d in log_ratios(team, reference, row).items():
            others = sum(value for other, value in values.items() if other != role)
            total = total - F.logsigmoid(beta * (d + others)) / len(rows)
    team.zero_grad()
    total.backward()
    return {name: x.grad.clone() for name, x in team.named_parameters() if x.requires_grad}


@pytest.mark.parametrize(
    ("form", "reference_free"),
    [("full", False), ("full", True), ("heterogeneous", False), ("shared", False), ("lora", False)],
)
def test_each_agent_gets_its_own_factor_of_the_joint_gradient(tmp_path, form, reference_free):
    initial = team_of(form)
    team = shift(copy.deepcopy(initial))
    expected = factorised_gradients(team, None if reference_free else initial, pairs(number=6), beta=0.3)
    found, _ = one_update(tmp_path, initial, [Shift()], reference_free=reference_free, beta=0.3)
    assert distance(found, expected) < 5e-6


@pytest.mark.parametrize("form", ["full", "lora"])
def test_checkpointing_does_not_change_the_gradients(tmp_path, form):
    plain, _ = one_update(tmp_path, team_of(form), [Shift()], beta=0.3)
    for case in CHECKPOINTING:
        if case != "kept activations":
            found, _ = one_update(tmp_path, team_of(form), [Shift()], beta=0.3, **CHECKPOINTING[case])
            assert distance(found, plain) < 1e-6


CASES = {name: {"loss_type": name} for name in LOSS_TYPES}
CASES["a list"] = {"loss_type": ["sigmoid", "hinge", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
CASES["cut answers"] = {"max_length": 24}
CASES["conversations"] = {}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


def texts_of_trl(rows):
    names = ("prompt", "chosen", "rejected")
    return rows.rename_columns(dict(zip(text_columns("solo"), names, strict=True))).select_columns([*names])


@pytest.mark.parametrize("case", CASES)
def test_one_agent_equals_trl_s_dpo(tmp_path, case):
    """Three updates, their metrics, and an evaluation."""
    chat = case == "conversations"
    settings = {"optim": "sgd", "learning_rate": 0.1, "beta": 0.2, **CASES[case]}
    settings["per_device_eval_batch_size"] = 12  # TRL takes means over batches
    rows = pairs(["solo"], chat=chat)
    texts = texts_of_trl(rows)
    team = tiny_team(["solo"], TEMPLATE if chat else None, num_hidden_layers=2)
    trainer = pair_trainer(tmp_path / "team", team, train_dataset=rows, eval_dataset=rows, **settings)
    model = tiny_llama()
    args, tokenizer = pair_config(tmp_path / "trl", DPOConfig, **settings), byte_tokenizer(TEMPLATE if chat else None)
    single = DPOTrainer(model, tiny_llama(), args, None, texts, texts, processing_class=tokenizer)
    for each in (trainer, single):
        each.train()
        each.evaluate()
    for name, x in model.state_dict().items():
        assert torch.allclose(team.agents["solo"].state_dict()[name], x, rtol=1e-5, atol=1e-6), name
    assert len(single.state.log_history) == 5
    for ours, theirs in zip(trainer.state.log_history, single.state.log_history, strict=True):
        names = [name for name in theirs if not name.endswith(("runtime", "per_second", "total_flos"))]
        expected = pytest.approx({name: theirs[name] for name in names}, rel=1e-3, abs=1e-5)
        assert {name: ours[name] for name in names} == expected


def test_one_mixture_of_experts_equals_trl_s_dpo(tmp_path):
    settings = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "router_aux_loss_coef": 0.7}
    rows = pairs(["solo"])
    model, ours = tiny_experts("qwen3_moe"), tiny_team(["solo"])
    ours.models["solo"] = copy.deepcopy(model)
    ours = type(ours)({"solo": copy.deepcopy(model)}, ours.tokenizers)
    trainer = pair_trainer(tmp_path / "team", ours, train_dataset=rows, **settings)
    args, reference = pair_config(tmp_path / "trl", DPOConfig, **settings), copy.deepcopy(model)
    single = DPOTrainer(model, reference, args, None, texts_of_trl(rows), processing_class=byte_tokenizer())
    for each in (trainer, single):
        each.train()
    for name, x in model.state_dict().items():
        assert torch.allclose(ours.agents["solo"].state_dict()[name], x, rtol=1e-5, atol=1e-6), name
    theirs = single.state.log_history[0]["aux_loss"]
    assert trainer.state.log_history[0]["agents/solo/aux_loss"] == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("case", ["a list", "ipo", "experts"])
def test_the_update_does_not_depend_on_padding_and_micro_batches(tmp_path, case):
    """Ten pairs, in one micro-batch, and in three of unequal size, packed and padded in other ways."""
    settings = {"train_dataset": pairs(number=10), "beta": 0.3, **CASES.get(case, {})}

    def team():
        models = {"aux": tiny_llama(), "main": tiny_experts("qwen3_moe") if case == "experts" else tiny_llama(1)}
        return type(tiny_team())(models, {role: byte_tokenizer() for role in models})

    whole, log = one_update(tmp_path, team(), [Shift()], per_device_train_batch_size=10, **settings)
    split = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    found, split_log = one_update(tmp_path, team(), [Shift()], **split, **settings)
    assert distance(found, whole) < 1e-5
    assert split_log["loss"] == pytest.approx(log["loss"], rel=1e-5)


@pytest.mark.parametrize("reference_free", [False, True])
def test_a_frozen_partner_is_a_constant(tmp_path, reference_free):
    settings = {"frozen_agents": ["aux"], "beta": 0.3, "reference_free": reference_free}
    initial = tiny_team()
    team = copy.deepcopy(initial)
    team.freeze(["aux"])
    expected = factorised_gradients(shift(team), None if reference_free else initial, pairs(number=6), beta=0.3)
    found, log = one_update(tmp_path, initial, [Shift()], **settings)
    assert distance(found, expected) < 5e-6
    assert not any(name.startswith("agents/aux/") for name in log)
    if not reference_free:
        assert log["rewards/margins"] == pytest.approx(log["agents/main/rewards/margins"], abs=1e-5)


def test_metrics_and_loss_are_means_over_pairs_and_tokens(tmp_path):
    """
    Evaluations of five pairs in batches of 1, 2, 3 and 5, and a training step in micro-batches of 3 and 2, against
    sums by hand.
    """
    initial, rows = tiny_team(), pairs(number=5)
    team = shift(copy.deepcopy(initial))
    settings = {"beta": 0.3, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "eval_dataset": rows}
    with torch.no_grad():
        ratios = torch.stack([sum(log_ratios(team, initial, row).values()) for row in rows])
        chosen = {role: [answer_logps(team, role, row, "chosen") for row in rows] for role in team.roles}
    loss = -F.logsigmoid(0.3 * ratios).mean() - 0.5 * sum(torch.cat(x).mean() for x in chosen.values())
    expected = {"loss": loss.item(), "rewards/accuracies": (ratios > 0).float().mean().item()}
    expected["rewards/margins"] = 0.3 * ratios.mean().item()
    expected["agents/aux/logps/chosen"] = torch.stack([x.sum() for x in chosen["aux"]]).mean().item()
    metrics = []
    for size in (1, 2, 3, 5):
        trainer = pair_trainer(tmp_path, copy.deepcopy(initial), per_device_eval_batch_size=size, **settings)
        shift(trainer.team)
        found = {name.removeprefix("eval_"): x for name, x in trainer.evaluate().items()}
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        metrics.append({name: x for name, x in found.items() if not name.endswith(("runtime", "per_second"))})
    assert all(x == pytest.approx(metrics[0], rel=1e-4, abs=1e-6) for x in metrics)
    split = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    _, log = one_update(tmp_path, copy.deepcopy(initial), [Shift()], train_dataset=rows, **split, **settings)
    assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert log["entropy"] == pytest.approx(metrics[0]["entropy"], rel=1e-4)

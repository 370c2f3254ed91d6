"""Actor-critic trainers: updates against plain PyTorch, checkpoints, metrics."""

import copy
import json
import shutil
from dataclasses import asdict

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel, BitsAndBytesConfig, Trainer

from trl_multiagent import AgentTeam, FunctionEnvironment, IACConfig, IACTrainer, MAACConfig, MAACTrainer
from trl_multiagent.hub import push_folder
from trl_multiagent.models.pretrained import TooLongError
from trl_multiagent.team import critics
from trl_multiagent.trainers.base.actor_critic_trainer import value_errors
from trl_multiagent.trainers.base.batch import critic_inputs

from by_hand import Gradients, distance, log_probability
from tiny import (
    Workflow,
    byte_tokenizer,
    count_reward,
    other_model,
    team_of,
    tiny_environment,
    tiny_experts,
    tiny_llama,
    tiny_team,
    tiny_trainer,
)


def ordered(order):
    """Rewards of the last turn alone; the prompts show the last answer of an agent that acted before."""
    prompts = {"aux": "Task {x}, part aux:", "main": "Task {x}, {aux}, part main:"}
    return FunctionEnvironment(prompts, count_reward, order=order)


TRAINERS = {"iac": (IACTrainer, IACConfig), "maac": (MAACTrainer, MAACConfig)}


def critic_trainer(tmp_path, algorithm="iac", form="model", team=None, **settings):
    """A trainer whose critics say something from the start."""
    trainer_class, config_class = TRAINERS[algorithm]
    trainer = tiny_trainer(
        tmp_path, team, trainer=trainer_class, config=config_class, critic_form=form, discount=0.7, **settings
    )
    torch.manual_seed(5)
    for _, parameter in sorted(trainer.team.critics.heads.named_parameters()):
        parameter.data.normal_(std=0.2)
    for scale in trainer.team.critics.scales.values():
        scale.update(0.3, 0.5)
    for name, parameter in trainer.team.named_parameters():
        if "lora_B.critic" in name:
            parameter.data.normal_(std=0.1)
    return trainer


def update_by_hand(trainer, before, num_generations):
    """The gradients of an update, from the trees alone, one sequence at a time."""
    args, roles, turns = trainer.args, before.roles, trainer._turns
    central = isinstance(trainer, MAACTrainer)
    nodes = [(turn, node) for turn, nodes in enumerate(turns) for node in nodes]
    tokenizers = before.tokenizers

    def prompt_ids(role, node):
        return node.samples[role].prompt_ids

    def read(critic, node, j):
        """V(h), or Q of joint action j."""
        if central:
            prompts = {role: tokenizers[role].decode(prompt_ids(role, node)) for role in roles if role in node.prompts}
            parts = [f"[{role}]\n{text}" for role, text in prompts.items()]
            answers = node.joint_actions[j] if j is not None else {}
            parts += [f"[{role} answers]\n{text}" for role, text in answers.items()]
            ids = tokenizers[roles[0]]("\n\n".join(parts))["input_ids"]
        else:
            ids = list(prompt_ids(critic, node))
            if j is not None:
                ids += node.samples[critic].completion_ids[node.indices[j][[*node.prompts].index(critic)]]
        critics = before.critics
        with before.activate(critics.backbones[critic].role, critic):
            model = critics.backbones[critic].model
            model = model.get_base_model() if hasattr(model, "get_base_model") else model
            hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
        return 0.3 + (0.5 - 0.09) ** 0.5 * critics.heads[critic](hidden)[0]

    def values(critic, node):
        if args.critic_type == "q":
            return [read(critic, node, j) for j in range(len(node.indices))]
        return [read(critic, node, None)] * max(1, len(node.indices))

    critic_names = before.critics.names
    read_nodes = {c: [node for _, node in nodes if central or c in node.prompts] for c in critic_names}
    value_of = {(c, id(node)): values(c, node) for c in critic_names for node in read_nodes[c]}

    def mean(numbers):
        return sum(numbers) / len(numbers)

    def target(c, node, j):
        outcome = node.outcomes[j]
        reward = outcome.role_rewards.get(c, outcome.reward)
        if j not in node.children:
            return reward
        child = node.children[j]
        later = mean([target(c, child, k) for k in range(len(child.indices))])
        if (c, id(child)) not in value_of:  # its agent does not act there
            return reward + args.discount * later
        value = mean([v.item() for v in value_of[c, id(child)]])
        return reward + args.discount * ((1 - args.gae_lambda) * value + args.gae_lambda * later)

    total = 0.0
    for c in critic_names:
        num_actions = sum(len(node.indices) for node in read_nodes[c])
        for node in read_nodes[c]:
            for j in range(len(node.indices)):
                error = (target(c, node, j) - value_of[c, id(node)][j]) ** 2
                total = total + args.value_loss_coef * error / num_actions
    for role in roles:
        c = "central" if central else role
        by_turn, own_nodes = {}, [(turn, node) for turn, node in nodes if role in node.prompts]
        for turn, node in own_nodes:
            i = [*node.prompts].index(role)
            for g in range(num_generations):
                own = [j for j, index in enumerate(node.indices) if index[i] == g]
                y = mean([target(c, node, j) for j in own])
                others = [j for j in range(len(node.indices)) if j not in own] or own
                used = others if args.critic_type == "q" else own
                by_turn.setdefault(turn, {})[id(node), g] = y - mean([value_of[c, id(node)][j].item() for j in used])
        for turn, node in own_nodes:
            numbers = torch.tensor(list(by_turn[turn].values()), dtype=torch.float64)
            for g, ids in enumerate(node.samples[role].completion_ids):
                advantage = by_turn[turn][id(node), g]
                if args.advantage_normalization and len(numbers) > 1:
                    advantage = (advantage - numbers.mean().item()) / numbers.std(correction=0).item()
                with before.activate(role) as agent:
                    log_p = log_probability(agent, node.samples[role].prompt_ids, ids)
                total = total - advantage * log_p.sum() / (len(own_nodes) * num_generations)
    total.backward()
    return {name: x.grad for name, x in before.named_parameters() if x.requires_grad}


def check_by_hand(trainer, num_generations):
    gradients = Gradients()
    trainer.add_callback(gradients)
    before = copy.deepcopy(trainer.team)
    for agent in before.agents.values():
        agent.__dict__.pop("forward", None)
    trainer.train()
    expected = update_by_hand(trainer, before, num_generations)
    assert distance(gradients.of, expected) < 1e-5
    critics = {name: x for name, x in expected.items() if "critic" in name}
    assert distance({name: gradients.of[name] for name in critics}, critics) < 1e-5
    return gradients.of


TREE = {"num_turns": 2, "num_generations": 2, "gae_lambda": 0.95}


@pytest.mark.parametrize(
    ("algorithm", "form", "team", "settings"),
    [
        ("iac", "model", "full", TREE),
        ("iac", "adapter", "lora", {"num_turns": 2, "critic_type": "q", "num_generations": 2}),
        ("iac", "head", "lora", {**TREE, "critic_value_head_hidden_dim": 8}),
        ("iac", "head", "full", {"num_turns": 1, "critic_type": "q", "gradient_checkpointing": True}),
        ("iac", "head", "shared", {"num_turns": 2, "num_generations": 1}),
        ("maac", "model", "shared", {**TREE, "advantage_normalization": False, "value_loss_coef": 2.0}),
        ("maac", "adapter", "lora", {**TREE, "critic_type": "q", "joint_mode": "cross", "num_agents": 2}),
        ("maac", "adapter", "lora on two bases", {**TREE, "gradient_checkpointing": True}),
    ],
)
def test_the_update_is_that_of_plain_pytorch(tmp_path, algorithm, form, team, settings):
    settings = {"items_per_device": 1 if "joint_mode" in settings else 2, **settings}
    trainer = critic_trainer(tmp_path, algorithm, form, team_of(team), per_device_train_batch_size=3, **settings)
    check_by_hand(trainer, trainer.args.num_generations)


def test_a_mixture_of_experts(tmp_path):
    base = tiny_experts("qwen3_moe")
    base = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False), "aux")
    base.add_adapter("main", LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    models = dict.fromkeys(("aux", "main"), base)
    team = AgentTeam(models, {role: byte_tokenizer() for role in models})
    settings = {**TREE, "critic_type": "q", "gradient_checkpointing": True, "router_aux_loss_coef": 0.0}
    check_by_hand(critic_trainer(tmp_path, "maac", "adapter", team, **settings), 2)


@pytest.mark.parametrize(("algorithm", "form", "bits"), [("maac", "adapter", 8), ("iac", "head", 4)])
def test_a_quantized_base(tmp_path, bits, algorithm, form):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
    quantization = BitsAndBytesConfig(**four if bits == 4 else {"load_in_8bit": True})
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    base = str(tmp_path / "base")
    team = AgentTeam.from_pretrained(base, ["aux", "main"], config, quantization_config=quantization)
    trainer = critic_trainer(tmp_path / "run", algorithm, form, team, gradient_checkpointing=bits == 4, **TREE)
    check_by_hand(trainer, 2)
    trainer.save_model()
    trainer.team.critics.load(tmp_path / "run")


def test_episodes_that_end_early(tmp_path):
    settings = {"num_turns": 2, "items_per_device": 6, "per_device_train_batch_size": 5}
    trainer = critic_trainer(tmp_path, num_generations=2, early_termination_threshold=0.12, **settings)
    check_by_hand(trainer, 2)
    ended = [node.ended_early for node in trainer._turns[0]]
    assert True in ended and False in ended


ORDER = [["aux"], ["aux", "main"]]


@pytest.mark.parametrize(
    ("algorithm", "environment", "settings"),
    [
        ("iac", Workflow(), TREE),
        ("iac", Workflow(), {"branching": "episodes", "critic_type": "q", "num_generations": 2, "gae_lambda": 0.5}),
        ("maac", Workflow(shared=True), {**TREE, "critic_type": "q"}),
        ("iac", ordered(ORDER), {"num_turns": 2, "num_generations": 2, "gae_lambda": 0.5}),
    ],
)
def test_roles_that_do_not_act(tmp_path, algorithm, environment, settings):
    settings = {"num_turns": 3, "items_per_device": 3, "per_device_train_batch_size": 5, **settings}
    trainer = critic_trainer(tmp_path, algorithm, environment=environment, **settings)
    check_by_hand(trainer, trainer.args.completions_per_node)


def test_a_central_critic_needs_a_shared_reward(tmp_path):
    trainer = critic_trainer(tmp_path, "maac", environment=Workflow(), num_turns=2)
    with pytest.raises(ValueError, match="the environment gives each role a reward of its own: use IAC"):
        trainer.train()


def test_one_agent_is_the_plain_actor_critic(tmp_path):
    team = tiny_team(("solo",))
    gradients = check_by_hand(critic_trainer(tmp_path, team=team, items_per_device=4), 1)
    assert {name.split(".")[0] for name in gradients} == {"models", "critics"}


def test_metrics(tmp_path):
    for algorithm, names in (("iac", ("aux", "main")), ("maac", ("central",))):
        trainer = critic_trainer(tmp_path, algorithm, num_turns=2, items_per_device=4)
        trainer.train()
        log = trainer.state.log_history[0]
        for name in names:
            targets, values = [], []
            for node in (node for nodes in trainer._turns for node in nodes):
                targets += node.targets[name]
                values += node.values[name]
            targets, values = torch.tensor(targets), torch.tensor(values)
            metrics = {key.removeprefix(f"critics/{name}/"): x for key, x in log.items() if f"critics/{name}/" in key}
            errors = targets - values
            assert metrics["value_loss"] == pytest.approx(errors.pow(2).mean().item(), rel=1e-3)
            expected = 1 - errors.var() / targets.var()
            assert metrics["explained_variance"] == pytest.approx(expected.item(), rel=1e-3)
            assert metrics["value_mean"] == pytest.approx(values.mean().item(), rel=1e-3)
            for role in [name] if algorithm == "iac" else ["aux", "main"]:
                assert log[f"agents/{role}/advantage_mean"] == pytest.approx(errors.mean().item(), rel=1e-3)
                assert log[f"agents/{role}/advantage_std"] == pytest.approx(errors.std(correction=0).item(), rel=1e-3)


def test_learning_rates(tmp_path):
    trainer = critic_trainer(tmp_path, agent_learning_rates={"aux": 0.1}, learning_rate=0.2, critic_learning_rate=0.3)
    trainer.create_optimizer()
    rates = {}
    names = {parameter: name for name, parameter in trainer.team.named_parameters()}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            rates.setdefault(names[parameter].rpartition(".layers")[0] or names[parameter], set()).add(group["lr"])
    assert {rate for name, x in rates.items() for rate in x if name.startswith("models.aux")} == {0.1}
    assert {rate for name, x in rates.items() for rate in x if name.startswith("models.main")} == {0.2}
    assert {rate for name, x in rates.items() for rate in x if name.startswith("critics")} == {0.3}


def test_value_clipping(tmp_path):
    """In later passes over a batch, a value beyond the range has no gradient unless it is on the wrong side."""
    values = torch.tensor([1.0, 2.0, 0.3], requires_grad=True)
    targets, old = torch.tensor([[3.0, 0.0]] * 3), torch.tensor([[0.9, 0.9]] * 3)
    errors = value_errors(values, targets, old, 0.2)
    assert torch.allclose(errors, torch.tensor([[4.0, 1.0], [3.61, 4.0], [7.29, 0.49]]))
    errors.sum().backward()
    assert torch.allclose(values.grad, torch.tensor([-4.0 + 2.0, 4.0, -5.4]))
    assert torch.equal(value_errors(values, targets, old, None), (targets - values.unsqueeze(1)) ** 2)


@pytest.mark.parametrize(
    ("algorithm", "form", "team"),
    [("iac", "model", "full"), ("maac", "adapter", "lora")],
)
def test_a_run_resumes_bit_for_bit(tmp_path, algorithm, form, team):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "num_turns": 2, "beta": 0.1}
    teams = [team_of(team, num_hidden_layers=1) for _ in range(2)]
    whole = critic_trainer(tmp_path / "whole", algorithm, form, teams[0], **settings)
    whole.train()
    resumed = critic_trainer(tmp_path / "resumed", algorithm, form, teams[1], **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    expected, found = whole.team.state_dict(), resumed.team.state_dict()
    assert all(torch.equal(x, found[name]) for name, x in expected.items())
    assert resumed.team.critics.scales == whole.team.critics.scales
    for left, right in zip(whole.state.log_history[2:4], resumed.state.log_history[2:4], strict=True):
        same = [key for key in left if key.startswith(("critics", "agents", "loss", "reward"))]
        assert len(same) > 20 and all(left[key] == right[key] for key in same if "time" not in key)


def test_the_best_model_has_its_scales_also_under_deepspeed(tmp_path, monkeypatch):
    """DeepSpeed's files, which `Trainer` loads there, have none."""
    trainer = critic_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=2, save_only_model=True)
    trainer.train()
    saved = json.loads((tmp_path / "checkpoint-1" / "critics" / "critics.json").read_text())["scales"]
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    monkeypatch.setattr(Trainer, "_load_best_model", lambda self: None)
    trainer.is_deepspeed_enabled = True
    assert {name: asdict(x) for name, x in trainer.critics.scales.items()} != saved
    trainer._load_best_model()
    assert {name: asdict(x) for name, x in trainer.critics.scales.items()} == saved


def test_a_critic_of_an_adapters_base_has_its_revision(tmp_path, monkeypatch):
    tiny_llama().save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    lora = LoraConfig(target_modules="all-linear", r=2)
    team = AgentTeam.from_pretrained(str(tmp_path / "base"), ["aux", "main"], lora, revision="v2")
    loaded, load = [], critics.create_model_from_path
    monkeypatch.setattr(
        critics,
        "create_model_from_path",
        lambda *args, revision=None, **options: loaded.append(revision) or load(*args, **options),
    )
    critic_trainer(tmp_path / "run", team=team)
    assert loaded == ["v2", "v2"]


def test_files(tmp_path):
    team = tiny_team()
    trainer = critic_trainer(tmp_path / "run", team=team, save_strategy="steps", save_steps=1)
    trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    trainer.save_model(str(tmp_path / "final"))
    for folder in (checkpoint, tmp_path / "final"):
        backbone = AutoModel.from_pretrained(folder / "critics" / "main")
        for name, x in team.critics.models["main"].state_dict().items():
            assert torch.equal(backbone.state_dict()[name], x)
        assert (folder / "critics" / "main" / "value_head.safetensors").is_file()
    loaded = AgentTeam.from_pretrained(str(tmp_path / "final"))
    assert loaded.critics is None and loaded.roles == team.roles

    # A critic that was trained before is a start for another run
    models = [str(tmp_path / "final" / "critics" / role) for role in ("aux", "main")]
    again = tiny_trainer(tmp_path / "b", trainer=IACTrainer, config=IACConfig, critic_models=models)
    for name, x in team.critics.state_dict().items():
        assert torch.equal(again.team.critics.state_dict()[name], x)
    assert again.team.critics.scales == team.critics.scales != critic_trainer(tmp_path / "d").team.critics.scales

    with pytest.raises(ValueError, match=r"no critics: there is no .*critics\.json"):
        shutil.rmtree(tmp_path / "final" / "critics")
        team.load_weights(tmp_path / "final")
    other = critic_trainer(tmp_path / "c", "maac")
    with pytest.raises(ValueError, match=r"has the critics \['aux', 'main'\], this run has \['central'\]"):
        other.team.load_weights(checkpoint)
    shutil.rmtree(checkpoint / "critics")
    with pytest.raises(ValueError, match=r"is damaged: missing, .*critics/aux"):
        critic_trainer(tmp_path / "run", save_strategy="steps", max_steps=2).train(resume_from_checkpoint=True)


def test_a_push_leaves_critics_out(tmp_path, monkeypatch):
    trainer = critic_trainer(tmp_path / "run", form="head")
    trainer.save_model(str(tmp_path / "run"), _internal_call=True)
    assert (tmp_path / "run" / "critics" / "critics.json").is_file()
    patterns = []
    monkeypatch.setattr("trl_multiagent.hub.open_repo", lambda repo_id, *args: repo_id)
    monkeypatch.setattr(trainer, "init_hf_repo", lambda **kwargs: None)
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **kwargs: patterns.append(kwargs["allow_patterns"]))
    trainer.push_to_hub()
    for with_critics in (False, True):
        push_folder(tmp_path / "run", "user/team", with_critics=with_critics)
    paths = ["agents/aux/config.json", "critics/aux/value_head.safetensors", "critics/critics.json"]
    kept = [list(filter_repo_objects(paths, allow_patterns=x)) for x in patterns]
    assert kept == [paths[:1], paths[:1], paths]


def test_a_critic_with_another_tokenizer_reads_the_text(tmp_path):
    other = byte_tokenizer()
    other.add_tokens(["Task"])
    tiny_llama(3, vocab_size=259).save_pretrained(tmp_path / "critic")
    other.save_pretrained(tmp_path / "critic")
    trainer = tiny_trainer(tmp_path, trainer=IACTrainer, config=IACConfig, critic_models=str(tmp_path / "critic"))
    trainer.train()
    node = trainer._turns[0][0]
    ids = trainer.critic_text("aux", node, None)
    assert ids[0] == 258 and other.decode(ids) == node.prompts["aux"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"value_clip_range": 0.0}, "`value_clip_range` is 0.0"),
        ({"num_generations": -2}, "`num_generations` is -2"),
        ({"handoff": "best", "num_turns": 2, "num_generations": 2}, "follows one joint action"),
    ],
)
def test_settings_that_cannot_work(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        IACConfig(str(tmp_path), use_cpu=True, **settings)


def test_a_text_of_a_critic_beyond_learned_positions_is_refused(tmp_path):
    roles = ("aux", "main")
    team = AgentTeam({role: other_model("gpt2") for role in roles}, {role: byte_tokenizer() for role in roles})
    environment = FunctionEnvironment(dict.fromkeys(roles, "Task {x}" + "." * 200), count_reward)
    with pytest.raises(TooLongError, match="A text of the critic 'central' may have 4"):
        critic_trainer(tmp_path, "maac", "model", team, environment=environment).train()


def test_a_critic_on_the_agents_base_has_nothing_of_the_agents(tmp_path):
    """Its adapter does nothing at first: it reads with the base, not with the agents' adapters or copied modules."""
    settings = {"trainer": IACTrainer, "config": IACConfig, "critic_form": "adapter", "save_strategy": "steps"}
    trainer = tiny_trainer(tmp_path, team_of("lora and whole modules"), **settings)
    team, ids = trainer.team, torch.tensor([[80, 81, 82]])
    for head in team.critics.heads.values():
        head[-1].weight.data.normal_()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    values = team(team_inputs={}, critic_inputs={"main": inputs})["critics/main"]
    plain = team.critics.heads["main"](tiny_llama(0).model(ids).last_hidden_state[0, -1])
    assert torch.allclose(values, plain)
    values.sum().backward()
    graded = {name for name, x in team.named_parameters() if x.grad is not None and x.grad.any()}
    assert graded and all("critic_main" in name or name.startswith("critics.heads.main") for name in graded)

    # No file of an agent has anything of a critic, and the reverse
    team.zero_grad()
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    agent = load_file(tmp_path / "saved" / "agents" / "aux" / "adapter_model.safetensors")
    critic = load_file(tmp_path / "saved" / "critics" / "aux" / "adapter_model.safetensors")
    for name, x in team.models["aux"].named_parameters():
        for adapter, saved in (("aux", agent), ("critic_aux", critic)):
            if adapter in name.split("."):
                assert torch.equal(saved.pop(name.replace(f".{adapter}", "").replace(".modules_to_save", "")), x)
    assert not agent and not critic


def test_a_critic_reads_common_tokens_once(tmp_path):
    team = critic_trainer(tmp_path, "iac").team
    sequences = [[80, 81, 82, 83, 84], [80, 81, 82, 83, 84, 90, 91], [95]]
    inputs = critic_inputs(team.critics.backbones["main"].model, sequences, 0)
    assert inputs["input_ids"].numel() < sum(map(len, sequences))
    values = team(team_inputs={}, critic_inputs={"main": inputs})["critics/main"]
    for value, ids in zip(values, sequences, strict=True):
        alone = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
        assert torch.allclose(value, team(team_inputs={}, critic_inputs={"main": alone})["critics/main"][0], atol=1e-5)


def test_an_agent_has_nothing_of_a_critic_on_its_base(tmp_path):
    """Also in layers where the critic has an adapter and the agents have none, and with a reference policy."""
    base = tiny_llama()
    for k, role in enumerate(("aux", "main")):
        config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=k == 1)
        base = get_peft_model(base, config, role) if k == 0 else base
        if k == 1:
            base.add_adapter(role, config)
    team = AgentTeam({"aux": base, "main": base}, {role: byte_tokenizer() for role in ("aux", "main")})
    ids = torch.tensor([[80, 81, 82]])
    before = {}
    for role in team.roles:
        with team.activate(role) as agent:
            before[role] = agent(ids).logits
    trainer = critic_trainer(tmp_path, "maac", "adapter", team, beta=0.1)
    team(team_inputs={}, critic_inputs={"central": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}})
    assert any("lora_B.critic_central" in name and "up_proj" in name for name, _ in team.named_parameters())
    for role in team.roles:
        with trainer.team.activate(role) as agent:
            assert torch.equal(agent(ids).logits, before[role])
            with team.as_reference():
                assert torch.equal(agent(ids).logits, before[role])


def test_critics_do_not_outlive_their_trainer(tmp_path):
    team = tiny_team()
    critic_trainer(tmp_path, team=team)
    critic_trainer(tmp_path, team=team)  # the same critics go on
    with pytest.raises(ValueError, match="an earlier trainer with other settings"):
        critic_trainer(tmp_path, "maac", team=team)
    with pytest.raises(ValueError, match="which this one does not train"):
        tiny_trainer(tmp_path, team)


def test_normalized_advantages(tmp_path):
    """Equal ones are zero, and a single one is left as it is."""
    for items, expected in ((1, 1.7), (2, 0.0)):
        environment = tiny_environment(reward=lambda completions, **columns: [1.7] * len(completions))
        trainer = tiny_trainer(
            tmp_path, None, environment, trainer=IACTrainer, config=IACConfig, items_per_device=items
        )
        trainer.train()
        for node in trainer._turns[0]:
            assert trainer.node_advantages(node)["aux"].item() == pytest.approx(expected)

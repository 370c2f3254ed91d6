"""The gradients of an update, computed in plain PyTorch, one sequence at a time, without padding."""

import copy
from collections import defaultdict

import torch
from transformers import TrainerCallback
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import GRPOTrainer, RLOOTrainer

from tiny import SHORT, count_reward, tiny_team, tiny_trainer


CHECKPOINTING = {"kept activations": {"gradient_checkpointing": False}} | {
    name: {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    for name, reentrant in (("recomputed", False), ("recomputed, reentrant", True))
}


class Gradients(TrainerCallback):
    """Keeps the gradients of the first optimizer step."""

    def __init__(self):
        self.of = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.of = {name: x.grad.clone() for name, x in model.named_parameters() if x.requires_grad}


def one_update(tmp_path, team=None, **settings):
    """The gradients of one optimizer step, the trees it used, and the team before it."""
    team = tiny_team(num_hidden_layers=2) if team is None else team
    before = copy.deepcopy(team, {id(x): x for x in team.tokenizers.values()})  # but for the tokenizers
    gradients = Gradients()
    trainer = tiny_trainer(tmp_path, team, callbacks=[gradients], **settings)
    trainer.train()
    return gradients.of, trainer, before


def log_probability(model, prompt_ids, completion_ids, temperature=1.0):
    """log pi of each completion token, from one plain forward."""
    ids = torch.tensor([prompt_ids + completion_ids])
    logits = model(ids).logits[0, len(prompt_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1)[range(len(completion_ids)), completion_ids]


def baseline(returns, g, mode):
    others = returns[:g] + returns[g + 1 :]
    of = {"mean": sum(returns) / len(returns), "rloo": sum(others) / len(others), "max": max(returns), "raw": 0.0}
    return of[mode]


def value(node, j, discount):
    """R_j, from the rewards alone."""
    if j not in node.children:
        return node.rewards[j]
    child = node.children[j]
    values = [value(child, k, discount) for k in range(len(child.rewards))]
    return node.rewards[j] + discount * sum(values) / len(values)


def reference_gradients(
    turns, team, mode="mean", joint="align", discount=1.0, weights=None, temperature=1.0, beta=0.0, reference=None
):
    nodes = [(turn, node) for turn, nodes in enumerate(turns) for node in nodes]
    roles = team.roles
    size = len(nodes[0][1].samples[roles[0]].texts)
    for k, role in enumerate(roles):
        if role in team.frozen:
            continue
        loss = 0.0
        for turn, node in nodes:
            joint_returns = [value(node, j, 0.0 if weights else discount) for j in range(len(node.rewards))]
            if joint == "align":
                returns = joint_returns
            else:  # the last agent's index runs fastest
                stride = size ** (len(roles) - 1 - k)
                containing = [[r for j, r in enumerate(joint_returns) if j // stride % size == g] for g in range(size)]
                returns = [sum(values) / len(values) for values in containing]
            samples = node.samples[role]
            for g, completion_ids in enumerate(samples.completion_ids):
                advantage = returns[g] - baseline(returns, g, mode)
                with team.activate(role) as agent:
                    log_p = log_probability(agent, samples.prompt_ids, completion_ids, temperature)
                row = -advantage * log_p.sum()
                if beta:
                    with torch.no_grad(), reference.activate(role) as agent:
                        log_r = log_probability(agent, samples.prompt_ids, completion_ids, temperature)
                    kl = (log_r - log_p).exp() - (log_r - log_p) - 1
                    # Corrects the estimate's gradient, see `use_bias_correction_kl`
                    ratio = (log_p - log_p.detach()).exp()
                    row = row + beta * (ratio * kl).sum()
                loss = loss + row * (weights[turn] if weights else 1.0)
        (loss / (len(nodes) * size)).backward()
    return {name: parameter.grad for name, parameter in team.named_parameters() if parameter.grad is not None}


def router_loss(turns, team, role):
    """The load-balancing loss over all tokens of the batch, each sequence on its own, by transformers' function."""
    by_layer = defaultdict(list)
    for samples in (node.samples[role] for nodes in turns for node in nodes):
        for completion_ids in samples.completion_ids:
            with team.activate(role) as agent:
                outputs = agent(torch.tensor([samples.prompt_ids + completion_ids]), output_router_logits=True)
            for k, logits in enumerate(outputs.router_logits):
                by_layer[k].append(logits)
    config = agent.config
    layers = tuple(torch.cat(logits) for logits in by_layer.values())
    return load_balancing_loss_func(layers, config.num_experts, config.num_experts_per_tok)


class FixedGRPO(GRPOTrainer):
    """Scores given completions instead of sampling."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return self.completions_of(prompt_ids), None

    def completions_of(self, prompt_ids):
        queues = {prompt: list(completions) for prompt, completions in self.given.items()}
        return [queues[tuple(ids)].pop(0) for ids in prompt_ids]


class FixedRLOO(RLOOTrainer):
    completions_of = FixedGRPO.completions_of

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return self.completions_of(prompt_ids)


def trl_trainer(
    tmp_path, trainer_class, config_class, trainer, before, dataset, callbacks=(), rewards=(count_reward,), **settings
):
    """TRL's own trainer, trained on the completions that an agent `solo` sampled, by default with `count_reward`."""
    fixed = {**SHORT, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "beta": 0.0}
    args = config_class(str(tmp_path / "trl"), **{**fixed, **settings})
    given = {"train_dataset": dataset, "processing_class": before.tokenizers["solo"], "callbacks": [*callbacks]}

    def of_one(function):
        return lambda completions, **columns: function([{"solo": text} for text in completions])

    single = trainer_class(before.agents["solo"], [of_one(function) for function in rewards], args, **given)
    samples = [node.samples["solo"] for node in trainer._turns[0]]
    single.given = {tuple(s.prompt_ids): s.completion_ids for s in samples}
    single.train()
    return single


def trl_update(*arguments, **settings):
    """The gradients and the log of TRL's own trainer, see `trl_trainer`."""
    gradients = Gradients()
    single = trl_trainer(*arguments, callbacks=[gradients], **settings)
    return gradients.of, single.state.log_history[0]


def distance(left, right):
    assert left.keys() == right.keys()
    difference = sum((left[name] - right[name]).double().pow(2).sum() for name in left)
    scale = sum(right[name].double().pow(2).sum() for name in right)
    assert scale > 0
    return (difference / scale).sqrt().item()

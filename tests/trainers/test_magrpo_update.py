"""The update: every gradient against a computation in plain PyTorch, one sequence at a time, without padding."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, RLOOConfig

import trl_multiagent
from trl_multiagent import AgentTeam, FunctionEnvironment, workflow
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.rollout.tree import nodes_of_episode

from by_hand import (
    FixedGRPO,
    FixedRLOO,
    Gradients,
    distance,
    log_probability,
    one_update,
    reference_gradients,
    trl_update,
)
from tiny import (
    ARCHITECTURES,
    byte_tokenizer,
    count_reward,
    other_model,
    tiny_environment,
    tiny_items,
    tiny_team,
    tiny_trainer,
)


NAMES = {"mean": "MAGRPO", "rloo": "MARLOO", "max": "MAReMax", "raw": "MAREINFORCE"}
TRAINERS = {
    mode: (getattr(trl_multiagent, f"{name}Trainer"), getattr(trl_multiagent, f"{name}Config"))
    for mode, name in NAMES.items()
}


# The baseline takes the returns of an agent's own samples, however these were paired
CASES = [("mean", "align", 2), ("mean", "cross", 2), ("rloo", "align", 2), ("max", "cross", 2), ("raw", "align", 2)]
CASES += [("mean", "align", 1), ("mean", "cross", 1), ("mean", "align", 3)]


@pytest.mark.parametrize(("mode", "joint", "num_turns"), CASES)
def test_gradient_by_hand(tmp_path, mode, joint, num_turns):
    trainer_class, config_class = TRAINERS[mode]
    settings = {"joint_mode": joint, "num_turns": num_turns, "num_agents": 2, "num_generations": 3, "discount": 0.7}
    settings["items_per_device"] = 2 if joint == "align" or num_turns == 1 else 1
    settings["gradient_checkpointing"] = num_turns > 1
    gradients, trainer, before = one_update(tmp_path, trainer=trainer_class, config=config_class, **settings)
    expected = reference_gradients(trainer._turns, before, mode, joint, discount=0.7)
    assert distance(gradients, expected) < 1e-5


@pytest.mark.parametrize("roles", [("solo",), ("one", "two", "three")])
@pytest.mark.parametrize("joint", ["align", "cross"])
def test_other_team_sizes(tmp_path, roles, joint):
    gradients, trainer, before = one_update(tmp_path, tiny_team(roles), joint_mode=joint, num_generations=2)
    assert distance(gradients, reference_gradients(trainer._turns, before, joint=joint)) < 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_other_architectures(tmp_path, architecture, gradient_checkpointing):
    """Rows share their prompts if every layer sees all of them."""
    model = other_model(architecture)
    team = AgentTeam({"solo": model}, {"solo": byte_tokenizer()})
    settings = {"num_turns": 2, "num_generations": 2, "gradient_checkpointing": gradient_checkpointing}
    gradients, trainer, before = one_update(tmp_path, team, **settings)
    assert distance(gradients, reference_gradients(trainer._turns, before)) < 1e-5


def test_temperature(tmp_path):
    gradients, trainer, before = one_update(tmp_path, temperature=0.7)
    assert distance(gradients, reference_gradients(trainer._turns, before, temperature=0.7)) < 1e-5


def test_gradient_with_early_termination(tmp_path):
    """The loss is a mean over the existing rows, not over the rows of a full tree."""
    gradients, trainer, before = one_update(
        tmp_path, num_turns=2, items_per_device=6, early_termination_threshold=0.12, num_generations=3
    )
    ended = [node.ended_early for node in trainer._turns[0]]
    assert True in ended and False in ended
    assert distance(gradients, reference_gradients(trainer._turns, before)) < 1e-5


@pytest.mark.parametrize("handoff", ["best", "random"])
def test_turn_weights_scale_the_gradients_of_a_chain(tmp_path, handoff):
    weights = [1.5, 0.25]
    gradients, trainer, before = one_update(
        tmp_path, num_turns=2, handoff=handoff, turn_gradient_weights=weights, discount=0.7
    )
    assert distance(gradients, reference_gradients(trainer._turns, before, weights=weights)) < 1e-5
    assert distance(gradients, reference_gradients(trainer._turns, before, weights=[1.0, 1.0])) > 0.1


def test_reference_penalty(tmp_path):
    """
    At the first step the penalty is zero, because the policy equals the reference. It is tested after a few steps.
    """
    team = tiny_team()
    initial = copy.deepcopy(team)
    history = []

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
            history.append((gradients, copy.deepcopy(model), trainer._turns))

    settings = {"max_steps": 3, "learning_rate": 0.05, "num_turns": 2, "num_generations": 2}
    trainer = tiny_trainer(tmp_path, team, beta=0.3, callbacks=[Keep()], **settings)
    trainer.train()
    gradients, policy, turns = history[-1]
    policy.zero_grad()
    for agent in policy.agents.values():
        del agent.__dict__["forward"]
    with_penalty = reference_gradients(turns, policy, beta=0.3, reference=initial)
    assert distance(gradients, with_penalty) < 1e-5
    policy.zero_grad()
    assert distance(gradients, reference_gradients(turns, policy)) > 0.05
    assert trainer.state.log_history[1]["agents/aux/kl"] > 0


def test_turn_weights_scale_the_reference_penalty(tmp_path):
    team = tiny_team()
    initial = copy.deepcopy(team)
    for agent in team.agents.values():
        agent.model.norm.weight.data.mul_(1.5)
    weights = [2.0, 0.5]
    gradients = Gradients()
    trainer = tiny_trainer(
        tmp_path, team, callbacks=[gradients], beta=0.3, num_turns=2, handoff="best", turn_gradient_weights=weights
    )
    trainer.ref_model.load_state_dict(initial.state_dict())
    before = copy.deepcopy(team)
    for agent in before.agents.values():
        del agent.__dict__["forward"]
    trainer.train()
    expected = reference_gradients(trainer._turns, before, weights=weights, beta=0.3, reference=initial)
    assert distance(gradients.of, expected) < 1e-5


@pytest.mark.parametrize("loss_type", ["luspo", "dr_grpo", "grpo", "dapo"])
def test_update_does_not_depend_on_micro_batches(tmp_path, loss_type):
    settings = {"num_turns": 2, "num_generations": 2, "early_termination_threshold": 0.12, "beta": 0.1}
    reference = None
    for size in (64, 3):
        gradients, *_ = one_update(
            tmp_path, items_per_device=3, per_device_train_batch_size=size, loss_type=loss_type, **settings
        )
        if reference is not None:
            assert distance(gradients, reference) < 1e-5
        reference = gradients


def test_rows_without_an_advantage_save_forwards(tmp_path):
    """
    Four items of four rows fill four micro-batches of four rows, and two items of equal rewards save two of them.
    """

    def reward(completions, x, **columns):
        return [r if int(item) % 2 else 0.0 for r, item in zip(count_reward(completions), x, strict=True)]

    found = {}
    for size in (64, 4):
        team = tiny_team()
        forwards = []
        team.register_forward_hook(lambda *_, forwards=forwards: forwards.append(1))
        data = Dataset.from_dict({"x": ["1", "2", "3", "4"]})
        settings = {"environment": tiny_environment(reward=reward), "train_dataset": data, "items_per_device": 4}
        found[size], trainer, _ = one_update(tmp_path, team, per_device_train_batch_size=size, **settings)
        batches = trainer._buffered_inputs
        assert len(forwards) == (1 if size == 64 else 2)
        assert [bool(batch.agents) for batch in batches] == [True] * len(forwards)
    for batch in batches:
        assert len({tuple(ids) for ids in batch.agents["aux"].prompt_ids.tolist()}) == 1  # the siblings of one node
    assert distance(found[4], found[64]) < 1e-5


@pytest.mark.parametrize("loss_type", ["dr_grpo", "grpo", "dapo"])
def test_other_losses_with_weighted_turns_by_hand(tmp_path, loss_type):
    weights = [2.0, 0.5]
    chain = {"num_turns": 2, "handoff": "best", "turn_gradient_weights": weights, "per_device_train_batch_size": 3}
    gradients, trainer, before = one_update(tmp_path, loss_type=loss_type, **chain)
    rows = [(node, g) for nodes in trainer._turns for node in nodes for g in range(len(node.rewards))]
    for role, agent in before.agents.items():
        lengths = [len(node.samples[role].completion_ids[g]) for node, g in rows]
        loss = 0.0
        for (node, g), length in zip(rows, lengths, strict=True):
            advantage = node.rewards[g] - sum(node.rewards) / len(node.rewards)
            log_p = log_probability(agent, node.samples[role].prompt_ids, node.samples[role].completion_ids[g])
            scale = {"dr_grpo": len(rows) * 8, "grpo": len(rows) * length, "dapo": sum(lengths)}[loss_type]
            loss = loss - weights[len(node.history)] * advantage * log_p.sum() / scale
        loss.backward()
    expected = {name: parameter.grad for name, parameter in before.named_parameters()}
    assert distance(gradients, expected) < 1e-5


@pytest.mark.parametrize("strings", [[], [*"aeiounrst "]])
def test_truncated_completions_can_be_masked(tmp_path, strings):
    """One that ends with a stop string of its role is not truncated."""
    settings = {"mask_truncated_completions": True, "stop_strings": {"main": strings}}
    gradients, trainer, before = one_update(tmp_path, items_per_device=12, **settings)
    rows = [(node, g) for node in trainer._turns[0] for g in range(len(node.rewards))]
    kept = stopped = 0
    for role, agent in before.agents.items():
        loss, clipped = 0.0, 0
        for node, g in rows:
            completion_ids, text = node.samples[role].completion_ids[g], node.samples[role].texts[g]
            assert role == "aux" or not set(text[:-1]) & set(strings)
            stops = role == "main" and text[-1:] in strings
            clipped += not stops and completion_ids[-1] != 256
            stopped += stops and len(completion_ids) < 8
            if stops or completion_ids[-1] == 256:
                kept += 1
                advantage = node.rewards[g] - sum(node.rewards) / len(node.rewards)
                log_p = log_probability(agent, node.samples[role].prompt_ids, completion_ids)
                loss = loss - advantage * log_p.sum() / len(rows)
        loss.backward()
        logged = trainer.state.log_history[0][f"agents/{role}/completions/clipped_ratio"]
        assert logged == pytest.approx(clipped / len(rows))
    assert 0 < kept < 2 * len(rows) and (stopped > 3) == bool(strings)
    expected = {name: parameter.grad for name, parameter in before.named_parameters()}
    assert distance(gradients, expected) < 1e-5


def test_an_agent_sees_the_others_only_through_the_reward(tmp_path):
    """Another partner that earns the same rewards leaves an agent's gradient as it was."""

    def only_aux(completions, **columns):
        return count_reward([{"aux": completion["aux"]} for completion in completions])

    gradients = []
    for seed in (1, 2):
        team = tiny_team()
        team.agents["main"].load_state_dict(tiny_team(("a", "b", "c")).agents["b" if seed == 1 else "c"].state_dict())
        gradients.append(one_update(tmp_path, team, environment=tiny_environment(reward=only_aux))[0])
    aux = [{name: g for name, g in run.items() if name.startswith("models.aux")} for run in gradients]
    main = [{name: g for name, g in run.items() if name.startswith("models.main")} for run in gradients]
    assert distance(aux[0], aux[1]) == 0.0
    assert distance(main[0], main[1]) > 0.1
    assert distance(aux[0], {name: 0.9 * g for name, g in aux[0].items()}) > 0.05


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("luspo", "luspo"), ("dr_grpo", "dr_grpo"), ("grpo", "grpo"), ("dapo", "dapo"), ("luspo", "rloo")],
)
def test_one_agent_and_one_turn_equals_trl(tmp_path, ours, theirs):
    """The same gradients as GRPOTrainer's, and MARLOO's as RLOOTrainer's, on the same completions."""
    environment = FunctionEnvironment({"solo": "{prompt}"}, count_reward)
    dataset = tiny_items(2).add_column("prompt", ["First task:", "The second task:"])
    trainer_class, config_class = TRAINERS["rloo" if theirs == "rloo" else "mean"]
    settings = {"environment": environment, "train_dataset": dataset, "loss_type": ours}
    team = tiny_team(("solo",))
    gradients, trainer, before = one_update(tmp_path, team, trainer=trainer_class, config=config_class, **settings)
    if theirs == "rloo":
        expected, _ = trl_update(tmp_path, FixedRLOO, RLOOConfig, trainer, before, dataset)
    else:
        settings = {"loss_type": theirs, "scale_rewards": "none"}
        expected, _ = trl_update(tmp_path, FixedGRPO, GRPOConfig, trainer, before, dataset, **settings)
    assert distance({name.removeprefix("models.solo."): g for name, g in gradients.items()}, expected) < 1e-5


def length_reward(completions, **columns):
    """A reward of another scale, which leaves some completions out."""
    texts = ["".join(by_role.values()) for by_role in completions]
    return [None if len(text) % 4 == 3 else 100.0 * len(text) for text in texts]


def test_reward_functions_that_are_normalized_before_the_sum_equal_trl(tmp_path):
    functions, weights = [count_reward, length_reward], [1.0, 0.3]
    environment = FunctionEnvironment({"solo": "{prompt}"}, functions, reward_weights=weights)
    dataset = tiny_items(2).add_column("prompt", ["First task:", "The second task:"])
    settings = {"environment": environment, "train_dataset": dataset, "loss_type": "dr_grpo"}
    team = tiny_team(("solo",))
    gradients, trainer, before = one_update(tmp_path, team, advantage_normalization="rewards", **settings)
    settings = {"loss_type": "dr_grpo", "multi_objective_aggregation": "normalize_then_sum"}
    settings |= {"reward_weights": weights, "rewards": functions}
    expected, _ = trl_update(tmp_path, FixedGRPO, GRPOConfig, trainer, before, dataset, **settings)
    assert distance({name.removeprefix("models.solo."): g for name, g in gradients.items()}, expected) < 1e-5


@pytest.mark.parametrize("branching", ["tree", "episodes"])
def test_returns_of_reward_functions_are_normalized_over_all_turns(tmp_path, branching):
    """A function with rewards a million times as large as those of the other changes nothing."""

    def large(completions, **columns):
        return [1e6 * x for x in count_reward(completions)]

    def again(item, history):
        return {role: f"Again, {role}:" for role in history[-1].prompts}

    gradients, prompts = [], {role: f"Task, {role}:" for role in ("aux", "main")}
    for functions in ([count_reward, length_reward], [large, length_reward]):
        environment = FunctionEnvironment(prompts, functions, transition=again)
        settings = {"num_turns": 2, "discount": 0.5, "branching": branching, "advantage_normalization": "rewards"}
        gradients.append(one_update(tmp_path, environment=environment, **settings)[0])
    assert distance(*gradients) < 5e-3


def test_every_episode_has_the_same_weight(tmp_path):
    """Some episodes have one turn, others two: the loss is the mean over episodes of the mean over their turns."""

    @workflow(roles=("solo",))
    async def talk(item, agents):
        text = await agents.solo("one:")
        if sum(map(ord, text)) % 2:
            text = await agents.solo("two:")
        return 1.0 + len(text)

    settings = {"branching": "episodes", "equal_episodes": True, "config": TRAINERS["raw"][1]}
    settings |= {"trainer": TRAINERS["raw"][0], "environment": talk}
    found, trainer, start = one_update(tmp_path, tiny_team(("solo",)), **settings)
    episodes = [nodes_of_episode(root) for root in trainer._turns[0]]
    assert {len(nodes) for nodes in episodes} == {1, 2}
    loss = 0.0
    for nodes in episodes:
        for node in nodes:
            samples = node.samples["solo"]
            logps = log_probability(start.agents["solo"], samples.prompt_ids, samples.completion_ids[0])
            loss = loss - nodes[-1].rewards[0] * logps.sum() / len(nodes)
    (loss / len(episodes)).backward()
    assert distance(found, {name: x.grad for name, x in start.named_parameters()}) < 1e-5


def every_third_is_none(completions, **columns):
    rewards = zip(completions, count_reward(completions), strict=True)
    return [None if sum(map(ord, c["aux"])) % 3 == 0 else reward for c, reward in rewards]


@pytest.mark.parametrize("branching", ["tree", "episodes"])
def test_joint_actions_without_a_reward_are_left_out(tmp_path, branching):
    """They are in no baseline and no mean of the loss, and they are counted."""
    settings = {"branching": branching, "num_turns": 1, "reward_none": "drop", "advantage_mode": "rloo"}
    environment = tiny_environment(reward=every_third_is_none)
    found, trainer, start = one_update(tmp_path, environment=environment, num_generations=5, **settings)
    (nodes,) = trainer._turns
    groups = [[(node.rewards[j], node, j) for j in range(len(node.rewards))] for node in nodes]
    if branching == "episodes":
        groups = [[x for group in groups[k : k + 5] for x in group] for k in range(0, len(groups), 5)]
    scored = [[x for x in group if not math.isnan(x[0])] for group in groups]
    number = sum(map(len, scored))
    assert 0 < number < 5 * len(groups) and min(map(len, scored)) > 1
    for role in start.roles:
        loss = 0.0
        for group in scored:
            for k, (reward, node, j) in enumerate(group):
                others = [x[0] for x in group[:k] + group[k + 1 :]]
                samples = node.samples[role]
                with start.activate(role) as agent:
                    logps = log_probability(agent, samples.prompt_ids, samples.completion_ids[j])
                loss = loss - (reward - sum(others) / len(others)) * logps.sum()
        (loss / number).backward()
    expected = {name: x.grad for name, x in start.named_parameters() if x.grad is not None}
    assert distance(found, expected) < 1e-5
    log = trainer.state.log_history[0]
    assert log["turn_1/reward_none"] == pytest.approx(1 - number / (5 * len(groups)))
    assert log["reward"] == pytest.approx(sum(x[0] for group in scored for x in group) / number)


@pytest.mark.parametrize("settings", [{"handoff": "best"}, {"discount": 0.0}])
def test_what_comes_later_without_a_reward_costs_no_earlier_one(tmp_path, settings):
    """Where the return is the immediate reward, it does not matter that nobody scored the next turn."""

    def reward(completions, episodes, **columns):
        rewards = zip(episodes, count_reward(completions), strict=True)
        return [reward if len(history) == 1 else None for history, reward in rewards]

    environment = tiny_environment(reward=reward)
    trainer = tiny_trainer(tmp_path, environment=environment, num_turns=2, reward_none="drop", **settings)
    trainer.train()
    assert all(node.children for node in trainer._turns[0])
    assert all(node.returns == node.rewards for node in trainer._turns[0])


@pytest.mark.parametrize("unscored", ["without an answer", "with both answers"])
def test_credit_of_joint_actions_without_a_reward(tmp_path, unscored):
    def reward(completions, **columns):
        are_whole = [all(c.values()) == (unscored == "with both answers") for c in completions]
        are_left_out = [x and sum(map(ord, c["main"])) % 2 == 0 for x, c in zip(are_whole, completions, strict=True)]
        rewards = zip(are_left_out, count_reward(completions), strict=True)
        return [None if is_left_out else reward for is_left_out, reward in rewards]

    settings = {"credit": "nothing", "reward_none": "drop", "num_turns": 1}
    trainer = tiny_trainer(tmp_path, environment=tiny_environment(reward=reward), **settings)
    trainer.train()
    pairs = [
        (x, y)
        for node in trainer._turns[0]
        for x, y in zip(node.rewards, node.counterfactuals["aux"], strict=True)
        if not math.isnan(x - y)
    ]
    assert 0 < len(pairs) < sum(len(node.rewards) for node in trainer._turns[0])
    mean = sum(x - y for x, y in pairs) / len(pairs)
    assert trainer.state.log_history[0]["agents/aux/credit"] == pytest.approx(mean)
    before = tiny_team().state_dict()
    assert any(not torch.equal(x, before[name]) for name, x in trainer.team.state_dict().items())


def test_dapo_divides_by_the_tokens_that_count(tmp_path):
    """Those of completions that were cut off do not, where these are masked."""
    settings = {"loss_type": "dapo", "mask_truncated_completions": True, "max_completion_length": 16}
    found, trainer, start = one_update(tmp_path, items_per_device=12, num_turns=1, beta=0.0, **settings)
    (nodes,) = trainer._turns
    for role in start.roles:
        loss, number = 0.0, 0
        for node in nodes:
            samples, rewards = node.samples[role], torch.tensor(node.rewards)
            for ids, advantage in zip(samples.completion_ids, rewards - rewards.mean(), strict=True):
                if ids[-1] in start.end_tokens(role):
                    number += len(ids)
                    with start.activate(role) as agent:
                        loss = loss - advantage * log_probability(agent, samples.prompt_ids, ids).sum()
        assert 0 < number < sum(len(ids) for node in nodes for ids in node.samples[role].completion_ids)
        (loss / number).backward()
    assert distance(found, {name: x.grad for name, x in start.named_parameters() if x.grad is not None}) < 1e-5


def test_a_batch_without_any_reward_trains_nothing(tmp_path):
    environment = tiny_environment(reward=lambda completions, **_: [None] * len(completions))
    before = tiny_team().state_dict()
    settings = {"reward_none": "drop", "advantage_normalization": "role", "trace_steps": 1}
    trainer = tiny_trainer(tmp_path, environment=environment, **settings)
    trainer.train()
    assert all(torch.equal(x, before[name]) for name, x in trainer.team.state_dict().items())
    assert trainer.state.log_history[0]["turn_1/reward_none"] == 1.0 and "reward" not in trainer.state.log_history[0]
    with pytest.raises(TaskError, match="In a training, `reward_none: drop` leaves such joint actions out"):
        tiny_trainer(tmp_path / "other", environment=environment).train()

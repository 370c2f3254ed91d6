"""
Workflows: agents that act at some turns only, groups of episodes, rewards per role, counterfactual credit. Every
gradient is compared with a computation in plain PyTorch, one sequence at a time.
"""

import contextlib
from statistics import fmean

import pytest

from trl_multiagent import Environment, FunctionEnvironment, Outcome, OutOfTurns, workflow

from by_hand import distance, one_update
from by_hand_workflows import expected_gradients, nonzero
from tiny import count_reward, tiny_team, tiny_trainer


ROLES = ("aux", "main")


class Relay(Environment):
    """
    Plays a schedule: the roles that act at each turn. An episode ends after an answer with an even number of
    characters if `may_end`. Rewards differ by role if `per_role`.
    """

    def __init__(self, schedule, may_end=False, per_role=False, roles=ROLES):
        self.roles, self.schedule, self.may_end, self.per_role = roles, schedule, may_end, per_role
        self.asked = []  # the joint actions that were scored

    def prompts(self, item, history):
        ended = self.may_end and history and len("".join(history[-1].joint_action.values())) % 2 == 0
        if ended or len(history) == len(self.schedule):
            return {}
        seen = "".join(text[:4] for turn in history for text in turn.joint_action.values())
        return {role: f"{item['x']} {role} after {seen!r}:" for role in self.schedule[len(history)]}

    def score(self, items, joint_actions, histories):
        self.asked += joint_actions
        rewards = count_reward(joint_actions)
        if self.per_role:
            rewards = [{"aux": x, "main": 1.0 - 2 * x * x} for x in rewards]
        return [Outcome(x) for x in rewards]


TURNS = [("aux",), ("main",), ("aux", "main")]


@pytest.mark.parametrize("mode", ["mean", "rloo", "max", "raw"])
def test_episodes_of_different_lengths(tmp_path, mode):
    """The siblings are the episodes that are still there. One alone has no baseline, and learns nothing."""
    settings = {"num_turns": 3, "branching": "episodes", "num_generations": 4, "items_per_device": 3}
    environment = Relay([ROLES] * 3, may_end=True)
    found, trainer, before = one_update(
        tmp_path, environment=environment, advantage_mode=mode, discount=0.5, **settings
    )
    groups = [[node.tree for node in nodes] for nodes in trainer._turns]
    assert len(groups[0]) == 12 > len(groups[1]) > len(groups[2]) > 0
    assert distance(found, expected_gradients(trainer._turns, before, mode, discount=0.5)) < 1e-5
    log = trainer.state.log_history[0]
    assert log["env_step"] == sum(map(len, groups)) and log["turn_3/reward_mean"] == pytest.approx(
        fmean(node.rewards[0] for node in trainer._turns[2]), rel=1e-5
    )


@pytest.mark.parametrize("joint", ["align", "cross"])
@pytest.mark.parametrize("credit", ["nothing", "sibling"])
def test_counterfactual_credit(tmp_path, joint, credit):
    """An agent's return is the joint one minus the reward of the same joint action with its answer replaced."""
    environment = Relay([ROLES] * 2)
    settings = {"num_turns": 2, "num_generations": 3, "items_per_device": 1, "joint_mode": joint, "num_agents": 2}
    found, trainer, before = one_update(tmp_path, environment=environment, credit=credit, **settings)

    def less(node, j, role):
        index = dict(zip(node.prompts, node.indices[j], strict=True))
        texts = {other: node.samples[other].texts[g] for other, g in index.items()}
        texts[role] = "" if credit == "nothing" else node.samples[role].texts[(index[role] + 1) % 3]
        return count_reward([texts])[0]

    assert distance(found, expected_gradients(trainer._turns, before, less=less)) < 1e-5
    nodes = sum(map(len, trainer._turns))
    # Replaced by nothing, joint actions that differ in the agent's answer alone are the same
    own = 9 if joint == "cross" else 3
    distinct = 3 if credit == "nothing" else own
    assert len(environment.asked) == nodes * (own + 2 * distinct)
    assert "agents/aux/credit" in trainer.state.log_history[0]


def test_advantages_are_standardized_by_role(tmp_path):
    environment = Relay(TURNS, per_role=True)
    settings = {"num_turns": 3, "branching": "episodes", "num_generations": 4, "advantage_normalization": "role"}
    found, trainer, before = one_update(tmp_path, environment=environment, **settings)
    assert distance(nonzero(found), nonzero(expected_gradients(trainer._turns, before, standardized=True))) < 1e-5


def test_what_does_not_act_costs_nothing(tmp_path):
    """No token is sampled for a role that does not act, and an agent that never acts does not move."""
    settings = {"num_turns": 2, "num_generations": 3, "items_per_device": 1, "beta": 0.1}
    environment = Relay([("aux",), ("main",)], roles=("aux", "main", "idle"))
    found, trainer, _ = one_update(tmp_path, tiny_team(environment.roles), environment=environment, **settings)
    sampled = [(turn, role) for turn, nodes in enumerate(trainer._turns) for node in nodes for role in node.samples]
    assert sampled == [(0, "aux"), *[(1, "main")] * 3]
    assert all(x.abs().sum() == 0 for name, x in found.items() if ".idle." in name)
    samples = [x for nodes in trainer._turns for node in nodes for x in node.samples.values()]
    assert trainer.generated_tokens == sum(len(ids) for x in samples for ids in x.completion_ids)
    batches = [batch.agents for batch in trainer._buffered_inputs]
    masks = {role: [agents[role].completion_mask for agents in batches] for role in trainer.team.roles}
    rows = {role: sum(int(mask.any(dim=1).sum()) for mask in of_role) for role, of_role in masks.items()}
    assert rows == {"aux": 3, "main": 9, "idle": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"branching": "episodes", "handoff": "best", "num_turns": 2}, "cannot be combined with `handoff`"),
        ({"branching": "episodes", "joint_mode": "cross", "num_agents": 2}, "`joint_mode: cross`"),
        ({"branching": "episodes", "credit": "sibling"}, "use `credit: nothing`"),
        ({"num_generations": 1, "advantage_mode": "raw", "credit": "sibling"}, "use `credit: nothing`"),
        ({"branching": "forest"}, "branching"),
        ({"advantage_normalization": "team"}, "advantage_normalization"),
        ({"stop_strings": {"x": ["."]}}, "must have lists of texts for aux, main"),
        ({"stop_strings": {"aux": "."}}, "`stop_strings` is '.' for 'aux'; it must be a valid list"),
        ({"generation_kwargs": {"stop_strings": ["."]}}, "must not set 'stop_strings', which other arguments decide"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, **settings)


@pytest.mark.parametrize("order", [5, [1, 2], [[1], ["aux", "main"]], [[["aux"]], ["main"]], [["aux"], ["mian"]]])
def test_an_order_names_the_roles(order):
    with pytest.raises(ValueError, match=r"`order` (is|names) .*(such as|the roles are)"):
        FunctionEnvironment(dict.fromkeys(ROLES, "x"), count_reward, order=order)


def test_an_order_has_as_many_turns_as_the_trainer(tmp_path):
    """The reward comes at the end of the order, so a training with fewer turns would have none."""
    environment = FunctionEnvironment(dict.fromkeys(ROLES, "x"), count_reward, order=[["aux"], ["main"]])
    with pytest.raises(ValueError, match="`num_turns` is 3, but `order` has 2"):
        environment.check_turns(3)
    with pytest.raises(ValueError, match="`num_turns` is 1, but an episode has 2: set it to that"):
        tiny_trainer(tmp_path, environment=environment)


@pytest.mark.parametrize("branching", ["tree", "episodes"])
def test_counterfactual_credit_knows_the_last_turn(tmp_path, branching):
    @workflow(roles=ROLES)
    async def run(item, agents):
        with contextlib.suppress(OutOfTurns):
            await agents.aux("a")
            await agents.main("b")
        return 1.0  # whatever was said

    settings = {"branching": branching, "num_turns": 1, "max_steps": 1}
    trainer = tiny_trainer(tmp_path, environment=run, credit="nothing", **settings)
    trainer.train()
    assert all(node.counterfactuals["aux"] == node.rewards == [1.0] * len(node.rewards) for node in trainer._turns[0])


def test_credit_is_for_a_shared_reward(tmp_path):
    trainer = tiny_trainer(tmp_path, environment=Relay([ROLES], per_role=True), credit="nothing")
    with pytest.raises(Exception, match="`credit` divides a reward that all roles share"):
        trainer.train()

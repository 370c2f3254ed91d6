"""Roles that are not trained: functions, teams, populations, endpoints."""

import pytest
import torch

from trl_multiagent import (
    EndpointSeat,
    Environment,
    FunctionEnvironment,
    FunctionSeat,
    Outcome,
    Population,
    SeatedEnvironment,
    TeamSeat,
)
from trl_multiagent.endpoints import Answer, Question, make_endpoint
from trl_multiagent.environments.base import AgentCall, Turn, ask, judge, with_call
from trl_multiagent.environments.task_errors import TaskError, UnavailableError
from trl_multiagent.preferences.comparators import ask_model
from trl_multiagent.rollout.sampler import TeamSampler, TransformersGenerator
from trl_multiagent.rollout.sampling_arguments import sampling_arguments
from trl_multiagent.rollout.seats import Branch
from trl_multiagent.rollout.tree import Node, Samples, play_episodes, turns_of_episodes

from by_hand import distance, one_update, reference_gradients
from tiny import AsciiGame, byte_tokenizer, tiny_llama, tiny_team, tiny_trainer


class Dialogue(Environment):
    """
    A user opens, an agent answers, the user goes on until it says "bye". Each turn pays its number; an agent's words
    pay 10 each.
    """

    roles = ("agent", "user")

    def prompts(self, item, history):
        if history and history[-1].joint_action.get("user") == "bye":
            return {}
        role = self.roles[(len(history) + 1) % 2]
        return {role: f"{role} {len(history)}: " + "/".join(x for turn in history for x in turn.joint_action.values())}

    def score(self, items, joint_actions, histories):
        turns = [(len(h), "agent" in action) for action, h in zip(joint_actions, histories, strict=True)]
        return [Outcome(turn + 10.0 * answers, {"turn": float(turn)}, info=turn) for turn, answers in turns]


def user(item, prompt, history):
    return "bye" if len(history) >= 2 * item["rounds"] else f"hello{len(history)}"


def test_a_dialogue_with_a_simulated_user():
    """Only the agent's turns are turns of the trained team. What the user's turns pay is added to the turn before."""
    environment = SeatedEnvironment(Dialogue(), {"user": FunctionSeat(user)})
    asked = []

    def sample(nodes, number):
        asked.extend(node.prompts for node in nodes)
        return {"agent": [Samples([1], [[1]], [f"answer{len(node.history)}"]) for node in nodes]}

    items = [{"id": 1, "rounds": 1}, {"id": 2, "rounds": 2}]
    turns = play_episodes(items, environment, sample, num_turns=3)
    assert asked == [{"agent": x} for x in ("agent 1: hello0", "agent 1: hello0", "agent 3: hello0/answer0/hello2")]
    assert [[node.rewards[0] for node in nodes] for nodes in turns] == [[11.0 + 2, 11.0 + 2], [13.0 + 4], []]
    assert turns[0][1].returns == [13.0 + 17.0]
    (first,), (second, third) = turns_of_episodes(turns)
    assert first.outcome.metrics == {"turn": 2.0} and third.outcome.metrics == {"turn": 4.0}
    assert first.outcome.extra == {"answer/user": "bye"} and second.outcome.extra == {"answer/user": "hello2"}
    assert environment.roles == ("agent",) and environment.resume_settings()["seats"] == {"user": {"function": "user"}}


def test_a_seat_that_acts_together_with_an_agent_answers_every_joint_action():
    counts = iter(range(100))
    task = FunctionEnvironment(
        {"writer": "Write {x}", "judge": "Judge {x}"},
        lambda completions, **columns: [{"writer": float(c["judge"]), "judge": -99.0} for c in completions],
    )
    environment = SeatedEnvironment(task, {"judge": FunctionSeat(lambda item, prompt, history: str(next(counts)))})
    outcomes = judge(environment, [{"x": "a"}] * 3, [{"writer": "w"}] * 3, [()] * 3)
    assert [outcome.role_rewards for outcome in outcomes] == [{"writer": 0.0}, {"writer": 1.0}, {"writer": 2.0}]
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0, 2.0]


def test_an_order_without_the_seats():
    task = FunctionEnvironment(
        {"writer": "w", "reader": "{writer}", "editor": "{reader}"},
        lambda completions, **columns: [float(len(c["editor"])) for c in completions],
        order=[["writer"], ["reader"], ["editor"]],
    )
    environment = SeatedEnvironment(task, {"reader": FunctionSeat(lambda item, prompt, history: prompt[::-1])})
    assert environment.order == (("writer",), ("editor",))
    environment.check_turns(2)
    with pytest.raises(ValueError, match="`num_turns` is 1, but an episode has 2"):
        environment.check_turns(1)
    (prompts,) = ask(environment, [{"x": 1}], [()])
    (outcome,) = judge(environment, [{"x": 1}], [{"writer": "abc"}], [()])
    (later,) = ask(environment, [{"x": 1}], [(Turn(prompts, {"writer": "abc"}, outcome),)])
    assert (prompts, later, outcome.reward) == ({"writer": "w"}, {"editor": "cba"}, 0.0)


def test_functions_that_fail_are_named():
    environment = SeatedEnvironment(Dialogue(), {"user": FunctionSeat(lambda item, prompt, history: item["y"])})
    with pytest.raises(TaskError, match="plays 'user', raised KeyError: 'y'"):
        ask(environment, [{"rounds": 1}], [()])


def test_seats_without_an_end_are_refused():
    class Alone(Dialogue):
        def prompts(self, item, history):
            return {"user" if history else "agent": "x"}

    environment = SeatedEnvironment(Alone(), {"user": FunctionSeat(lambda *_: "x")})
    with pytest.raises(TaskError, match="Only seats acted in 100 turns in a row"):
        judge(environment, [{"x": 1}], [{"agent": "a"}], [()])


def test_every_episode_has_an_opening_of_its_own_whose_reward_counts():
    """The opening pays 10. It is added to the first turn of the trained agent."""
    numbers = iter(range(100))

    class Opened(Dialogue):
        def score(self, items, joint_actions, histories):
            return [10.0 if "user" in action else 1.0 for action in joint_actions]

    environment = SeatedEnvironment(Opened(), {"user": FunctionSeat(lambda *_: str(next(numbers)))})
    shown = []

    def sample(nodes, number):
        shown.extend(node.prompts["agent"] for node in nodes)
        return {"agent": [Samples([1], [[1]], ["answer"]) for node in nodes]}

    turns = play_episodes([{"id": 1}, {"id": 2}], environment, sample, num_turns=1, num_episodes=3)
    assert shown == [f"agent 1: {k}" for k in range(6)]
    assert [node.rewards for node in turns[0]] == [[10.0 + 1.0 + 10.0]] * 6
    seen = [node.outcomes[0].info.history[0].joint_action["user"] for node in turns[0]]
    assert seen == [str(k) for k in range(6)]  # each is scored with the opening that its agent has seen


def sampler_of(team, length=8):
    return TeamSampler(team, TransformersGenerator(team, sampling_arguments({"max_new_tokens": length}), seed=3))


def test_a_team_plays_a_role_and_is_not_trained(tmp_path):
    """
    The seat's agent has another name in its own team. Its weights stay, and the trained agent's gradient is its own.
    """
    other = tiny_team(("x", "y"))
    before = [x.clone() for x in other.parameters()]
    seat = TeamSeat(lambda: sampler_of(other, 4), "other", "y")
    environment = SeatedEnvironment(AsciiGame(("a", "b")), {"b": seat})
    found, trainer, start = one_update(tmp_path, tiny_team(("a",)), environment=environment, num_generations=4)
    assert distance(found, reference_gradients(trainer._turns, start)) < 1e-5
    assert all(torch.equal(x, y) for x, y in zip(before, other.parameters(), strict=True))
    assert {name.split(".")[1] for name in found} == {"a"} and trainer.environment.roles == ("a",)
    shown = [outcome.extra["answer/b"] for node in trainer._turns[0] for outcome in node.outcomes]
    assert len(set(shown)) > 1


def test_a_seat_takes_a_folder(tmp_path):
    """As in YAML, and with the arguments of `collaborate`. Nothing is loaded before the first answer."""
    team = tiny_team(("x", "y"))
    team.save_pretrained(tmp_path / "team")
    branches = [Branch({"id": k}, (), {"b": f"Task {k}:"}) for k in range(3)]
    seat = TeamSeat(tmp_path / "team", agent="y", seed=3, max_new_tokens=6)
    same = TeamSeat(lambda: sampler_of(team, 6), "team", "y")
    assert seat.sampler is None and seat.answer("b", branches) == same.answer("b", branches)
    assert seat.describe() == {"team": str(tmp_path / "team"), "agent": "y"}
    tiny_llama().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    plain = TeamSeat(tmp_path / "model", max_new_tokens=6)  # of a model without roles
    assert [len(plain.answer(role, [Branch({"id": 0}, (), {role: "Task"})])) for role in "bcb"] == [1, 1, 1]
    with pytest.raises(UnavailableError, match=r"`seats.b`: .* has the roles x, y, not 'b'"):
        TeamSeat(str(tmp_path / "team")).answer("b", branches)
    with pytest.raises(UnavailableError, match=r"`seats.b`: the team cannot be loaded from '/nowhere/team'"):
        TeamSeat("/nowhere/team").answer("b", branches)


def test_a_team_in_a_seat_draws_by_item_and_text():
    """
    What it answers does not depend on other branches or on torch's generator. Equal branches get different answers.
    """
    team = tiny_team(("x",))
    seat = TeamSeat(lambda: sampler_of(team), "team", "x")
    branches = [Branch({"id": k // 2}, (), {"b": f"Task {k // 2}:"}) for k in range(6)]
    answers = seat.answer("b", branches)
    torch.rand(1)
    assert seat.answer("b", branches[2:4]) == answers[2:4] and len(set(answers)) == 6


def test_two_seats_of_one_agent_are_two_players():
    """They have the same prompts, and draw by their roles."""
    task = FunctionEnvironment(
        {"a": "Task {x}", "b": "Judge {x}", "c": "Judge {x}"}, lambda completions, **_: [0.0] * len(completions)
    )
    team = tiny_team(("x",))
    seats = {role: TeamSeat(lambda: sampler_of(team), "team", "x") for role in "bc"}
    items = [{"id": k, "x": k} for k in range(8)]
    outcomes = judge(SeatedEnvironment(task, seats), items, [{"a": "w"}] * 8, [()] * 8)
    assert all(outcome.extra["answer/b"] != outcome.extra["answer/c"] for outcome in outcomes)


class Echo:
    """An endpoint whose answers are the names of the questions' files."""

    def ask(self, questions, stop_at_failure):
        return [Answer(question.key({}), 0, 0) for question in questions]


def test_an_endpoint_draws_by_item():
    """Also if the items come in different batches or processes, with equal prompts. The same item is drawn again."""
    seat = EndpointSeat(Echo())
    one, two, again = (seat.answer("b", [Branch({"id": k}, (), {"b": "Open:"})] * 2) for k in (1, 2, 1))
    assert len({*one, *two}) == 4 and one == again
    asked = Turn({"b": "Open:"}, {"b": "no"}, Outcome(0.0))
    question = with_call("Open:", AgentCall(memory=False))
    assert seat.answer("b", [Branch({"id": 1}, (asked,), {"b": question})])[0] not in one  # asked a second time
    nodes = [Node({"id": k}, (), {"b": "Open:"}) for k in (1, 2)]
    first, second = (ask_model(Echo(), byte_tokenizer(), "0", [node], 2)["b"][0].texts for node in nodes)
    assert len({*first, *second}) == 4


def test_an_endpoint_gets_the_settings_of_a_question():
    class Says:
        def ask(self, questions, stop_at_failure):
            asked.extend(questions)
            return [Answer("yes. no.", 0, 0) for _ in questions]

    asked = []
    prompt = with_call("Second:", AgentCall((".",), 8, memory=False))
    history = (Turn({"b": "First:"}, {"b": "maybe"}, Outcome(0.0)),)
    assert EndpointSeat(Says()).answer("b", [Branch({"id": 1}, history, {"b": prompt})]) == ["yes."]
    assert [message["content"] for message in asked[0].messages] == ["Second:"]
    endpoint = make_endpoint("model", "http://localhost:1/v1", max_tokens=16)
    assert endpoint.parameters_for(asked[0])["max_tokens"] == 8
    assert endpoint.parameters_for(Question((), max_tokens=32)) == endpoint.parameters


def test_two_populations_draw_apart_and_are_asked_for_their_members_once_per_batch():
    calls = []

    def members(step):
        calls.append(step)
        return {name: FunctionSeat(lambda item, prompt, history, name=name: name) for name in "pqr"}

    task = FunctionEnvironment(dict.fromkeys("abc", "Task {x}"), lambda completions, **_: [1.0] * len(completions))
    environment = SeatedEnvironment(task, {role: Population(members, "own", seed=1) for role in "bc"})
    outcomes = judge(environment, [{"x": k} for k in range(90)], [{"a": "w"}] * 90, [()] * 90)
    pairs = [(x.extra["answer/b"], x.extra["answer/c"]) for x in outcomes]
    assert len({*pairs}) == 9 and 20 <= sum(b == c for b, c in pairs) <= 40
    assert all(
        f"with/b/{b}" in x.metrics and f"with/c/{c}" in x.metrics for x, (b, c) in zip(outcomes, pairs, strict=True)
    )
    assert len(calls) == 2 * 2  # to answer and to name the partners


def test_partners_are_drawn_per_item_and_step(tmp_path):
    """All completions of an item meet the same partner. The logs name the partners."""
    names = ["p", "q", "r"]
    members = {name: FunctionSeat(lambda item, prompt, history, name=name: name) for name in names}
    environment = SeatedEnvironment(AsciiGame(("a", "b")), {"b": Population(lambda step: members, names, seed=1)})
    trainer = tiny_trainer(
        tmp_path, tiny_team(("a",)), environment=environment, items_per_device=6, max_steps=2, num_generations=3
    )
    partners = []
    play = trainer._play_trees

    def watched(items):
        turns = play(items)
        partners.append([{outcome.extra["answer/b"] for outcome in node.outcomes} for node in turns[0]])
        return turns

    trainer._play_trees = watched
    trainer.train()
    assert all(len(names) == 1 for step in partners for names in step)
    assert len({name for step in partners for (name,) in step}) == 3 and partners[0] != partners[1]
    assert any(name.startswith("turn_1/with/b/") for name in trainer.state.log_history[0])

"""Tools of TRL's `environment_factory` as a seat, and the reward of such an environment."""

import ast
import json
import time
from functools import partial

import pytest
from datasets import Dataset
from trl.chat_template_utils import add_response_schema, qwen3_chat_template

from trl_multiagent import Environment, FunctionEnvironment
from trl_multiagent.environments.base import Turn
from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.rollout.seats import Branch, SeatedEnvironment
from trl_multiagent.rollout.tools import ToolSeat, tool_reward
from trl_multiagent.rollout.tree import Samples, grow_trees, judge_nodes, play_episodes, turns_of_episodes

from tiny import byte_tokenizer, tiny_team, tiny_trainer


class Guess:
    """Guess the item's secret. The reward is 1 divided by the number of guesses, if the last one is right."""

    def reset(self, secret, **columns):
        self.secret, self.guesses = secret, []
        return f"It is at most {columns['limit']}."

    def guess(self, number: int) -> str:
        """
        Guess the secret.

        Args:
            number: The guess.
        """
        self.guesses.append(number)
        return f"{len(self.guesses)}: {'right' if number == self.secret else 'up' if number < self.secret else 'down'}"

    async def ask(self) -> list:
        """Ask for the guesses so far."""
        return self.guesses

    def get_reward(self):
        return (self.guesses[-1:] == [self.secret]) / max(1, len(self.guesses))

    def _secret(self):
        return self.secret


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def guess(number):
    return call("guess", number=number)


def results(text, *past, seat=None, item=None):
    """The answer of the tools to a text, after joint actions."""
    turns = [Turn({}, action, None) for action in (*past, {"agent": text})]
    item = {"secret": 5, "limit": 9} if item is None else item
    return (seat or ToolSeat(Guess)).answer("tools", [Branch(item, turns, {"tools": ""})])[0]


def test_results_are_those_of_trl():
    assert results("I think it is 5.") == ""
    assert results(guess(5)) == "1: right"
    assert results(f"First {guess(3)} then {guess(7)}, what was it? {call('ask')}") == "1: up\n2: down\n[3, 7]"
    assert results(call("_secret")) == "{'error': 'Tool _secret not found.'}"
    assert results(call("get_reward")) == "{'error': 'Tool get_reward not found.'}"
    assert results(call("guess", number="x")).startswith("{'error': \"'<' not supported between")
    assert "unexpected keyword argument 'self_'" in results(call("guess", self_=1))
    assert "error" in results("<tool_call>" + "[" * 100000 + "</tool_call>")
    assert results(guess(4)[:-1]) == "1: up"  # the answer was cut off after the call


NUMBER = '{"number": 5}'
OPENAI = '{"id": "1", "type": "function", "function": {"name": "guess", "arguments": "{\\"number\\": 5}"}}'
FORMS = {
    "Qwen3-Coder": "<tool_call>\n<function=guess>\n<parameter=number>\n5\n</parameter>\n</function>\n</tool_call>",
    "Qwen3-Coder, without tags": "<function=guess>\n<parameter=number>\n5\n</parameter>\n</function>",
    "Llama 3.1": f"<function=guess>{NUMBER}</function>",
    "Llama 3.2": f'{{"name": "guess", "parameters": {NUMBER}}}',
    "Llama 3.1, tag": f'<|python_tag|>{{"name": "guess", "parameters": {NUMBER}}}',
    "Mistral": f'[TOOL_CALLS][{{"name": "guess", "arguments": {NUMBER}}}]',
    "Mistral, decoded without special tokens": f'[{{"name": "guess", "arguments": {NUMBER}}}]',
    "Mistral 3": f"[TOOL_CALLS]guess[ARGS]{NUMBER}",
    "GLM": "<tool_call>guess\n<arg_key>number</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    "DeepSeek V3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>guess\n```json\n{NUMBER}\n```<｜tool▁call▁end｜>",
    "DeepSeek V3.1": f"<｜tool▁call▁begin｜>guess<｜tool▁sep｜>{NUMBER}<｜tool▁call▁end｜>",
    "gpt-oss": f"<|channel|>commentary to=functions.guess <|constrain|>json<|message|>{NUMBER}<|call|>",
    "OpenAI": OPENAI,
    "OpenAI, tagged": f"I try it. <tool_call>{OPENAI}</tool_call>",
    "OpenAI, message": f'{{"role": "assistant", "content": null, "tool_calls": [{OPENAI}]}}',
    "Hermes, without an end": f'<tool_call>{{"name": "guess", "arguments": {NUMBER}}}',
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_in_the_forms_of_models(form):
    assert results(FORMS[form]) == "1: right"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<tool_call>{"name": "guess", "arguments": {"number": 5', "not complete JSON: Expecting ',' delimiter"),
        ('<tool_call>{"arguments": {"number": 5}}</tool_call>', "has no 'name'"),
        ('<tool_call>{"name": "guess"}</tool_call>', "missing 1 required positional argument: 'number'"),
        ('<tool_call>{"name": "guess", "arguments": [5]}</tool_call>', "The 'arguments' of guess are [5] (list)"),
        ('<tool_call>{"name": "guess" "arguments": {}}</tool_call>', "but there is '\"arguments\": {}}'"),
        ("<tool_call>guess</tool_call>", "missing 1 required positional argument: 'number'"),
        ("<function=gess>\n</function>", "Tool gess not found."),
        ("<tool_call>5</tool_call>", "Tool 5 not found."),
    ],
)
def test_what_is_missing_in_a_call_is_named(text, message):
    assert message in ast.literal_eval(results(text))["error"]


@pytest.mark.parametrize("unit", ["guess", "<parameter=a>\n", "<parameter=", "<arg_key>a</arg_key><arg_value>b"])
def test_long_answers_without_an_end_are_read_at_once(unit):
    start = time.perf_counter()
    assert "error" in results("<tool_call>" + unit * (60000 // len(unit)))
    assert time.perf_counter() - start < 3  # 20 to 500 seconds if every beginning were followed to the end


@pytest.mark.parametrize("text", ['{"name": "Bob", "age": 3}', "[1, 2]", "{not JSON", "Hm: {}"])
def test_other_json_is_no_call(text):
    assert results(text) == ""


def test_the_state_is_that_of_the_branch():
    past = ({"agent": guess(3)}, {"tools": "1: up"})
    assert results(guess(7), *past) == "2: down"
    # What was written beside the last answer of the tools is not answered yet
    assert results(guess(5), {"agent": guess(3)}, {"agent": guess(4), "tools": "1: up"}) == "2: up\n3: right"
    with pytest.raises(
        TaskError, match=r"The tools of `Guess` returned '1: down' \(str\), and '1: up' .* must depend on the item"
    ):
        results(guess(7), {"agent": guess(3)}, {"tools": "1: down"})
    with pytest.raises(TaskError, match=r"`Guess\.reset` raised TypeError"):
        results(guess(7), item={})


def test_the_reward_is_that_of_the_calls_that_were_answered():
    seat, item = ToolSeat(Guess), {"secret": 5, "limit": 9}
    episode = [{"agent": guess(3)}, {"tools": "1: up"}, {"agent": guess(5)}]
    assert [seat.reward("tools", item, episode[:k]) for k in range(4)] == [0.0] * 4
    assert seat.reward("tools", item, [*episode, {"tools": "2: right"}, {"agent": guess(4)}]) == 0.5


def test_prompts_describe_the_tools():
    seat = ToolSeat(Guess)
    text = seat.instructions
    schemas = [json.loads(line) for line in text.partition("<tools>\n")[2].partition("\n</tools>\n")[0].splitlines()]
    assert [schema["function"]["name"] for schema in schemas] == ["ask", "guess"]
    assert schemas[1]["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert text.endswith('<tool_call>\n{"name": <name>, "arguments": <JSON object>}\n</tool_call>')
    assert seat.observation({"secret": 5, "limit": 9}) == "It is at most 9."


def sample(agent):
    """Samples of an agent that is a function of the node and the number of the completion."""

    def samples(nodes, number):
        texts = [[agent(node, g) for g in range(number)] for node in nodes]
        return {"agent": [Samples([1], [[1]] * number, of_node) for of_node in texts]}

    return samples


def test_a_tree_of_guesses():
    """
    All branches are played with one environment, and each has its own state. Two guesses, then an answer without a
    call.
    """
    seat = ToolSeat(Guess)
    task = FunctionEnvironment(
        prompts={"agent": "Guess! {tools}", "tools": "{agent}"},
        order=[["agent"], ["tools"], ["agent"], ["tools"], ["agent"]],
        reward_funcs=tool_reward(seat),
    )
    environment = SeatedEnvironment(task, {"tools": seat})
    assert environment.order == (("agent",),) * 3

    def agent(node, g):
        return guess(3 + 2 * g) if len(node.history) < 2 else f"done {g}"

    items = [{"secret": secret, "limit": 9} for secret in (5, 3)]
    score = partial(judge_nodes, environment)
    levels = grow_trees(items, environment, sample(agent), score, num_turns=3, num_generations=2)
    asked = [node.prompts["agent"] for node in levels[2]]
    assert asked == ["Guess! 2: " + x for x in ("up", "right", "up", "right", "right", "down", "right", "down")]
    assert levels[1][0].outcomes[1].extra == {"answer/tools": "2: right"}
    # The last guess of each branch: 3, 5, 3, 5
    assert [node.rewards for node in levels[2]] == [[x] * 2 for x in (0, 0.5, 0, 0.5, 0.5, 0, 0.5, 0)]
    assert levels[2][1].outcomes[0].metrics == {"rewards/Guess": 0.5}
    assert levels[0][0].returns == [0.25, 0.25]


class Play(Environment):
    """The agent and the tools take turns until the agent calls no tool."""

    roles = ("agent", "tools")

    def __init__(self, seat):
        self.seat = seat

    def prompts(self, item, history):
        if not history:
            return {"agent": f"{self.seat.instructions}\n\n{self.seat.observation(item)}"}
        last = history[-1].joint_action
        if "tools" in last:
            return {"agent": [{"role": "tool", "content": last["tools"]}]}
        return {"tools": ""} if self.seat.calls(last["agent"]) else {}

    def score(self, items, joint_actions, histories):
        return [
            self.seat.reward("tools", item, [*(turn.joint_action for turn in history), action])
            if "tools" in action
            else 0.0
            for item, action, history in zip(items, joint_actions, histories, strict=True)
        ]


def test_an_episode_ends_without_a_call():
    seat = ToolSeat(Guess)
    environment = SeatedEnvironment(Play(seat), {"tools": seat})
    numbers = [5, 7, 6]

    def agent(node, g):
        number = numbers[len(node.history)]
        return f"It is {number}." if "right" in str(node.prompts) else guess(number)

    items = [{"secret": x, "limit": 9} for x in (7, 5)]
    episodes = turns_of_episodes(play_episodes(items, environment, sample(agent), num_turns=3))
    assert [[turn.outcome.reward for turn in turns] for turns in episodes] == [[0.0, 0.5, 0.0], [1.0, 0.0]]
    assert episodes[0][1].prompts == {"agent": [{"role": "tool", "content": "1: up"}]}
    assert environment.resume_settings()["seats"] == {"tools": {"tools": "Guess"}}


def test_a_training_with_tools(tmp_path):
    """
    A guess is the number of characters that the agent writes before a vowel. Every reward is computed from the answers
    of the branch.
    """
    seat = ToolSeat(Guess, lambda text: [{"name": "guess", "arguments": {"number": len(text)}}])
    task = FunctionEnvironment(
        prompts={"agent": "Guess! {tools}", "tools": ""},
        order=[["agent"], ["tools"], ["agent"], ["tools"]],
        reward_funcs=tool_reward(seat),
    )
    items = Dataset.from_list([{"secret": 1 + k % 3, "limit": 9} for k in range(8)])
    settings = {"num_turns": 2, "items_per_device": 4, "stop_strings": {"agent": [*"aeiouAEIOU"]}, "temperature": 0.7}
    environment = SeatedEnvironment(task, {"tools": seat})
    trainer = tiny_trainer(tmp_path, tiny_team(("agent",)), environment, train_dataset=items, **settings)
    trainer.train()
    rewards = []
    for node in trainer._levels[1]:
        (past,) = (turn.joint_action["agent"] for turn in node.history)
        for text, reward in zip(node.samples["agent"].texts, node.rewards, strict=True):
            guesses = [len(past), len(text)]
            assert reward == (0.5 if guesses[1] == node.item["secret"] else 0.0)
            rewards.append(reward)
    assert len(rewards) == 4 * 4 * 4 and 0 < sum(rewards) < len(rewards) / 2
    assert trainer.state.log_history[0]["final_turn/reward"] == pytest.approx(sum(rewards) / len(rewards))


def test_other_forms_of_calls():
    """Those that transformers can parse, with the response template of a model."""
    tokenizer = add_response_schema(byte_tokenizer(qwen3_chat_template))

    def calls(text):
        return [x["function"] for x in tokenizer.parse_response(text, prefix="").get("tool_calls", [])]

    seat = ToolSeat(Guess, calls)
    assert results("Let me see. " + guess(6), seat=seat) == "1: down" and results("Hm.", seat=seat) == ""


def test_environments_that_cannot_play():
    class Empty:
        def reset(self):
            pass

    with pytest.raises(ValueError, match=r"`environment_factory` made .*, which needs a method `reset`"):
        ToolSeat(object)
    with pytest.raises(ValueError, match=r"`Empty` has no method `get_reward`: write a reward function."):
        tool_reward(ToolSeat(Empty))

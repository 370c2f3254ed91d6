"""Tools of TRL's `environment_factory` in workflows."""

import ast
import asyncio
import json
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from trl.chat_template_utils import add_response_schema, qwen3_chat_template

from trl_multiagent.environments.task_errors import TaskError
from trl_multiagent.environments.tools import Tools, tool_workflow
from trl_multiagent.rollout.options import HistoryOptions
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


def results(*texts, calls=None):
    """What the tools answer to the last of some texts."""
    tools = Tools(Guess(), {"secret": 5, "limit": 9}, calls)
    return [asyncio.run(tools.answer(text)) for text in texts][-1]


def test_results_are_those_of_trl():
    assert results("I think it is 5.") is None
    assert results(guess(5)) == "1: right" and results(guess(3), guess(7)) == "2: down"
    assert results(f"First {guess(3)} then {guess(7)}, what was it? {call('ask')}") == "1: up\n2: down\n[3, 7]"
    assert results(call("_secret")) == "{'error': 'Tool _secret not found.'}"
    assert results(call("get_reward")) == "{'error': 'Tool get_reward not found.'}"
    assert "'number' is 'x' (str); it must be int." in ast.literal_eval(results(call("guess", number="x")))["error"]
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
    "Kimi K2": f"<|tool_call_begin|>functions.guess:0<|tool_call_argument_begin|>{NUMBER}<|tool_call_end|>",
    "Cohere": f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "guess", "parameters": {NUMBER}}}]<|END_ACTION|>',
    "Phi": f'<|tool_call|>[{{"name": "guess", "arguments": {NUMBER}}}]<|/tool_call|>',
    "gpt-oss": f"<|channel|>commentary to=functions.guess <|constrain|>json<|message|>{NUMBER}<|call|>",
    "OpenAI": OPENAI,
    "OpenAI, tagged": f"I try it. <tool_call>{OPENAI}</tool_call>",
    "OpenAI, message": f'{{"role": "assistant", "content": null, "tool_calls": [{OPENAI}]}}',
    "Hermes, without an end": f'<tool_call>{{"name": "guess", "arguments": {NUMBER}}}',
    "MiniMax": '<minimax:tool_call>\n<invoke name="guess">\n<parameter name="number">5</parameter>\n</invoke>\n',
    "MiniMax M1": f'<tool_calls>\n{{"name": "guess", "arguments": {NUMBER}}}\n</tool_calls>',
    "a block of JSON": f'I try it.\n\n```json\n{{"name": "guess", "arguments": {NUMBER}}}\n```\n',
    "a block without a language": f'```\n[{{"name": "guess", "parameters": {NUMBER}}}]\n```',
    "Gemma 3": "```tool_code\nguess(number=5)\n```",
    "Llama 4": "[guess(number=5)]",
    "Llama 4, without a list": "guess(number=5)",
    "Llama 3.1, in Python": "<|python_tag|>guess(number=5)",
    "Hermes, in a block": f'<tool_call>\n```json\n{{"name": "guess", "arguments": {NUMBER}}}\n```\n</tool_call>',
    "ReAct": f"Thought: Hm.\nAction: guess\nAction Input: {NUMBER}\nObservation: ok\nAction: ask\nAction Input: ",
    "ReAct, a text": "**Action:** guess\n**Action Input:** 5",
    "ReAct, a block": f"Action: guess\nAction Input:\n```json\n{NUMBER}\n```",
    "ReAct, on a line": "Action: guess[5]",
    "ReAct, Python": "Action: guess(number=5)",
    "LangChain": f'Action:\n```json\n{{"action": "guess", "action_input": {NUMBER}}}\n```',
    "a number as a text": '<tool_call>{"name": "guess", "arguments": {"number": "5"}}</tool_call>',
    "a whole number as a fraction": '<tool_call>{"name": "guess", "arguments": {"number": 5.0}}</tool_call>',
    "behind code": f"```python\nx = 5\n```\nSo `x` it is: {guess(5)}",
    "code in an argument": call("guess", number="5") + "\n```\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_in_the_forms_of_models(form):
    assert results(FORMS[form]) == "1: right"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<tool_call>{"name": "guess", "arguments": {"number": 5', "not complete JSON: Expecting ',' delimiter"),
        ('<tool_call>{"arguments": {"number": 5}}</tool_call>', "has no 'name'"),
        ('<tool_call>{"name": "guess", "arguments": [5]}</tool_call>', "The 'arguments' of guess are [5] (list)"),
        ('<tool_call>{"name": "guess" "arguments": {}}</tool_call>', "but there is '\"arguments\": {}}'"),
        ("<function=gess>\n</function>", "Tool gess not found."),
    ],
)
def test_what_is_missing_in_a_call_is_named(text, message):
    assert message in ast.literal_eval(results(text))["error"]


UNITS = ["guess", "\n```a\n", "\nAction: f(", "\n```\n```", '<parameter name="a">', "<parameter=a>\n", "<parameter="]


@pytest.mark.parametrize("unit", [*UNITS, "<arg_key>a</arg_key><arg_value>b"])
def test_long_answers_without_an_end_are_read_at_once(unit):
    text = unit * (60000 // len(unit))
    assert "error" in results("<tool_call>" + text)  # minutes if each beginning were followed
    results(text)


OTHERS = ['{"name": "Bob", "age": 3}', "[1, 2]", "{not JSON", "Hm: {}", "[]", "[max(1, 2)]"]
OTHERS += ['```json\n{"a": 1}\n```']
OTHERS += [
    "```python\nguess(number=5)\n```",
    "```\nguess(number=5)\n```",
    "guess(5)",
    "Action: think of it",
    '{"action": "Final Answer", "action_input": "5"}',
]


@pytest.mark.parametrize("text", OTHERS)
def test_other_text_is_no_call(text):
    assert results(text) is None


@pytest.mark.parametrize("form", ["Hermes, without an end", "Qwen3-Coder", "ReAct", "MiniMax", "Mistral 3", "Gemma 3"])
def test_a_quoted_call_is_not_made(form):
    """It is an example."""
    quoted = f"One writes\n\n~~~~text\n{FORMS[form]}\n~~~~\n\nand reads the result."
    assert results(quoted) is None and results(f"{quoted} {guess(5)}") == "1: right"
    assert results(f"`{guess(5)}`".replace("\n", " ")) is None


class Typed(Guess):
    def show(self, text: str, numbers: list[int], exact: bool = False, label: str | None = None) -> str:
        """
        Show.

        Args:
            text: A text.
            numbers: Numbers.
            exact: A flag.
            label: A label.
        """
        return repr((text, numbers, exact, label))


def test_arguments_are_converted_by_their_annotations_in_every_form():
    tools = Tools(Typed(), {"secret": 5, "limit": 9})
    given = {"text": "12", "numbers": "[1, 2]", "exact": "true", "label": "null"}
    tags = "".join(f"<parameter={k}>{x}</parameter>" for k, x in given.items())
    other = "".join(f'<parameter name="{k}">{x}</parameter>' for k, x in given.items())
    values = {"text": 12, "numbers": ["1", 2.0], "exact": "True", "label": "null"}
    forms = [f"<function=show>{tags}</function>", f'<invoke name="show">{other}</invoke>', call("show", **given)]
    forms += [call("show", **values), "[show(text='12', numbers=[1, 2], exact=True, label='null')]"]
    assert {asyncio.run(tools.answer(text)) for text in forms} == {"('12', [1, 2], True, 'null')"}
    wrong = asyncio.run(tools.answer(call("show", text="a", numbers="b")))
    assert "The argument 'numbers' is 'b' (str); it must be list[int]." in ast.literal_eval(wrong)["error"]


def test_long_results_are_cut():
    tools = Tools(Typed(), {"secret": 5, "limit": 9}, max_characters=40)
    long, short = call("show", text="x" * 99, numbers=[]), guess(5)
    assert asyncio.run(tools.answer(long)) == f"('{'x' * 38}\n[cut: 40 of 120 characters are shown]"
    shown = asyncio.run(tools.answer(long + short))
    assert shown == f"('{'x' * 18}\n[cut: 20 of 120 characters are shown]\n1: right"


def test_other_forms_of_calls():
    """Those that transformers can parse, with the response template of a model."""
    tokenizer = add_response_schema(byte_tokenizer(qwen3_chat_template))

    def calls(text):
        return [x["function"] for x in tokenizer.parse_response(text, prefix="").get("tool_calls", [])]

    assert results("Let me see. " + guess(6), calls=calls) == "1: down" and results("Hm.", calls=calls) is None


def sample(agent):
    """Samples of an agent that is a function of the node and the number of the completion."""

    def samples(nodes, number):
        texts = [[agent(node, g) for g in range(number)] for node in nodes]
        return {"agent": [Samples([1], [[1]] * number, of_node) for of_node in texts]}

    return samples


@pytest.mark.parametrize("options", [{"max_history_length": 4000}, {"memory_mode": "last"}])
def test_results_where_a_template_demands_a_message_of_the_user(options):
    """As that of Qwen3.5: a result that comes first becomes one."""
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3_5_think.jinja").read_text()
    environment = tool_workflow(Guess, "Guess! ", calls=lambda text: [{"name": "guess", "arguments": {"number": 5}}])
    seen = tiny_team(("agent",), template).collaborate(
        {"secret": 7, "limit": 9},
        environment,
        num_turns=2,
        max_new_tokens=2,
        history_options=HistoryOptions(**options),
    )
    assert seen[1].prompts["agent"][0]["content"] == "1: up"


def test_an_environment_lives_in_its_episode():
    """Each call is made once, and an environment is used again after `reset`. An episode ends without a call."""
    made = []
    environment = tool_workflow(lambda: made.append(Guess()) or made[-1], "Guess! ", live=True)
    numbers = [5, 7, 6]

    def agent(node, g):
        number = numbers[len(node.history)]
        return f"It is {number}." if "right" in str(node.prompts) else guess(number)

    items = [{"secret": x, "limit": 9} for x in (7, 5)]
    for _ in range(2):
        first, second = turns_of_episodes(play_episodes(items, environment, sample(agent)))
    assert sorted(len(guess.guesses) for guess in made) == [1, 2]
    assert [[turn.outcome.reward for turn in turns] for turns in (first, second)] == [[0.0, 0.0, 0.5], [0.0, 1.0]]
    assert [turn.outcome.metrics["no_call"] for turn in first] == [0.0, 0.0, 1.0]
    assert first[1].prompts == {"agent": [{"role": "tool", "content": "1: up"}]}
    text = first[0].prompts["agent"]
    assert text.endswith("</tool_call>\n\nGuess! It is at most 9.")
    schemas = [json.loads(line) for line in text.partition("<tools>\n")[2].partition("\n</tools>\n")[0].splitlines()]
    assert [schema["function"]["name"] for schema in schemas] == ["ask", "guess"]
    assert schemas[1]["function"]["parameters"]["properties"]["number"]["type"] == "integer"


def test_a_tree_of_guesses():
    """Each branch has its own state. The calls of the last turn count, too."""
    environment = tool_workflow(Guess, lambda item: [{"role": "user", "content": "Guess! "}], results="So: {results}")

    def agent(node, g):
        return guess(3 + 2 * g)

    items = [{"secret": secret, "limit": 9} for secret in (5, 3)]
    turns = grow_trees(
        items, environment, sample(agent), lambda x: judge_nodes(environment, x), num_turns=2, num_generations=2
    )
    assert [node.prompts["agent"] for node in turns[1]] == [f"So: 1: {x}" for x in ("up", "right", "right", "down")]
    assert [node.rewards for node in turns[1]] == [[0, 0.5], [0, 0.5], [0.5, 0], [0.5, 0]]


def test_an_item_names_its_environment():
    class Other(Guess):
        def reset(self, limit, **columns):
            assert "environment" not in columns
            super().reset(2, limit=limit)

    environment = tool_workflow({"given": Guess, "two": Other})
    items = [{"prompt": "Guess!", "environment": "given", "secret": 5, "limit": 9}]
    items.append({"prompt": "Two!", "environment": "two", "limit": 4})
    episodes = turns_of_episodes(play_episodes(items, environment, sample(lambda node, g: guess(2)), num_turns=1))
    assert [turns[0].outcome.reward for turns in episodes] == [0.0, 1.0]
    assert episodes[1][0].prompts["agent"].endswith("Two!")
    with pytest.raises(TaskError, match="column `environment` has 'three'; the environments are given, two"):
        play_episodes([{"environment": "three"}], environment, sample(None))


def test_a_training_with_tools(tmp_path):
    """A guess is the number of characters before a vowel. Every reward is computed from the answers of the branch."""

    def calls(text):
        return [{"name": "guess", "arguments": {"number": len(text)}}]

    environment = tool_workflow(Guess, "Guess! ", results="{results}", calls=calls)
    items = Dataset.from_list([{"secret": 1 + k % 3, "limit": 9} for k in range(8)])
    settings = {"num_turns": 2, "items_per_device": 4, "stop_strings": {"agent": [*"aeiouAEIOU"]}, "temperature": 0.7}
    trainer = tiny_trainer(tmp_path, tiny_team(("agent",)), environment, train_dataset=items, **settings)
    trainer.train()
    rewards = []
    for node in trainer._turns[1]:
        for text, reward in zip(node.samples["agent"].texts, node.rewards, strict=True):
            assert reward == (0.5 if len(text) == node.item["secret"] else 0.0)
            rewards.append(reward)
    assert len(rewards) == 4 * 4 * 4 and 0 < sum(rewards) < len(rewards) / 2
    assert trainer.state.log_history[0]["final_turn/reward"] == pytest.approx(sum(rewards) / len(rewards))


def test_environments_that_cannot_play():
    class Empty:
        def reset(self):
            pass

    with pytest.raises(ValueError, match=r"`environment_factory` made .*, which needs a method `reset`"):
        tool_workflow(object)
    with pytest.raises(ValueError, match="has no method `get_reward`: write a workflow with `Tools`"):
        tool_workflow(Empty)
    with pytest.raises(TaskError, match=r"^`Guess\.reset` raised TypeError"):
        play_episodes([{"prompt": "x"}], tool_workflow(Guess), sample(None))

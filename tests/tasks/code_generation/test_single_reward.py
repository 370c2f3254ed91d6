"""The code reward as a reward function of TRL."""

import pickle

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from trl_multiagent.models.reasoning import TAGS
from trl_multiagent.rewards import CodeRewardFunction, code_reward

from tiny import SHORT, byte_tokenizer, tiny_llama


PROMPT = 'def double(x):\n    """Twice x."""\n'
HUMANEVAL = {
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6\n",
}
MBPP = {
    "code": "def double(x):\n    return x + x",
    "test_list": ["assert double(2) == 4", "assert double(3) == 6"],
    "test_imports": [],
}
ANSWERS = ["def double(x):\n    return 2 * x\n", "def double(x):\n    return 4\n", "no code"]


def columns(row):
    return {name: [value] * len(ANSWERS) for name, value in row.items()} | {"trainer_state": None}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(("row", "prompt"), [(HUMANEVAL, PROMPT), ({"task_id": 7, **MBPP}, "Double x.")])
def test_columns_of_humaneval_and_mbpp(row, prompt, chat):
    prompts, completions = [prompt] * 3, ANSWERS
    if chat:
        prompts = [[{"role": "system", "content": "Write Python."}, {"role": "user", "content": prompt}]] * 3
        completions = [[{"role": "assistant", "content": f"```python\n{answer}```"}] for answer in ANSWERS[:2]]
        completions.append([{"role": "assistant", "content": None}])  # as of a tool call
        row = {"problem": prompt, **row}
    rewards = CodeRewardFunction(kind="paper")(prompts=prompts, completions=completions, **columns(row))
    assert rewards == pytest.approx([2.1, 1.6, 0.0])


def test_the_kind_earned_pays_no_trivial_answer():
    rewards = pickle.loads(pickle.dumps(code_reward))([PROMPT] * 3, ANSWERS, **columns(HUMANEVAL))
    assert rewards == pytest.approx([2.1, 1.1, 0.0])
    assert code_reward.__name__ == "code_reward" and code_reward == CodeRewardFunction()


def test_a_test_needs_no_check():
    rewards = code_reward([PROMPT] * 3, ANSWERS, **columns({**HUMANEVAL, "test": "\n".join(MBPP["test_list"])}))
    assert rewards == pytest.approx([2.1, 1.1, 0.0])


def test_an_answer_may_continue_the_prompt():
    body, wrong, lead = "    return 2 * x\n", "    y = 2 * x\n", "    y = 2\n    return y * x\n\nprint(double(1))"
    completions = [body, lead, wrong, f"{PROMPT}{body}", "I would double it."]
    columns = {name: [value] * 5 for name, value in HUMANEVAL.items()}
    rewards = CodeRewardFunction(kind="paper")([PROMPT] * 5, completions, **columns)
    assert rewards == pytest.approx([2.1, 2.1, 0.0, 2.1, 0.0])


SUM = """total = 0
# add the squares
text = '''a
  b'''
for x in xs:
    if x % 2 == 0:
        # even
        total += x * x
assert text == "a\\n  b"
return total
"""


def at_level(first, unit):
    """`SUM` at another level, with its text as it is."""
    lines = [first + line.replace("    ", unit) for line in SUM.split("\n")]
    lines[3] = "  b'''"
    return "\n".join(lines)


def test_a_body_is_joined_to_its_prompt_at_its_own_level():
    prompt = 'import math\n\n\ndef total(xs):\n    """Sum of the even squares."""\n'
    test = "def check(candidate):\n    assert candidate([1, 2, 4]) == 20\n    assert candidate([6, 5]) == 36\n"
    levels = [("", "    "), ("", "\t"), ("  ", "  "), ("    ", "    "), ("        ", "  "), ("\t", "\t")]
    bodies = [at_level(*level) for level in levels]
    bodies += [body.strip() for body in bodies]
    bodies += [f"Sure:\n```python\n{body}\n```\n" for body in bodies] + [f"\n{bodies[2]}\nThat's (it.\n"]
    bodies += [f"{SUM}\ndef helper(x):\n    return x\n", SUM.replace("\n", "\r\n"), f"{SUM}\nThat's (it.\n"]
    columns = {"entry_point": ["total"] * len(bodies), "test": [test] * len(bodies)}
    rewards = CodeRewardFunction(kind="paper")([prompt] * len(bodies), bodies, **columns)
    assert rewards == pytest.approx([2.1] * len(bodies))


@pytest.mark.parametrize("kind", ["paper", "earned"])
def test_what_the_tests_can_call_is_paid(kind):
    """Whatever binds the entry point, but nothing that cannot be called."""
    method = "    def double(self, x):\n        return 2 * x\n"
    answers = ["double = lambda x: 2 * x", f"class Solution:\n{method}", f"class A:\n{method}double = A().double"]
    answers += ["def g(x):\n    return 2 * x\ndouble = g", "import functools\ndouble = functools.partial(max)"]
    answers += ["double = staticmethod(lambda x: 2 * x)", f"```python\nclass Solution:\n{method}```"]
    right = [reward == pytest.approx(2.1) for reward in score(kind, answers)]
    assert right == [True, True, True, True, False, True, True]
    junk = ["double = 1", "def g():\n    return 7\ndouble = g()", "double = object()", "double = 1 / 0", "double: int"]
    junk += [
        "import math as double",
        "class Solution:\n    def double(self, x):\n        pass\n",
        "double",
        "double == 3",
    ]
    junk += ["class A:\n    def __init__(self, x):\n        self.x = x\n    def double(self, x):\n        return 1\n"]
    assert score(kind, junk) == [0.0] * len(junk)


def score(kind, answers, **settings):
    columns = {name: [value] * len(answers) for name, value in HUMANEVAL.items()}
    return CodeRewardFunction(kind=kind, **settings)([PROMPT] * len(answers), answers, **columns)


def test_a_reasoning_does_not_count():
    """The text alone says where the answer is."""
    draft, right = (
        "```python\ndef double(x):\n    return 4\n```\n" + "Hm. " * 9000,
        "def double(x):\n    return 2 * x\n",
    )
    answers = [f"{begin}{draft}{end}{right}" for begin, end in TAGS.items()]
    answers += [
        f"{draft}</think>\n\n{right}",
        *(f"analysis{x} {draft}assistantfinal{right}" for x in ("Maybe", "need")),
    ]
    start = "<|channel|>{}<|message|>"
    answers.append(start.format("analysis") + f"{draft}<|end|><|start|>assistant" + start.format("final") + right)
    answers += [f" to=self<|message|>{draft}<|eom|><|start|>assistant to=user<|message|>{right}"]
    answers += [f"<think>{draft}</think>    return 2 * x", f"{right}    # '</think>', '[/THINK]'\n"]
    assert score("paper", answers) == pytest.approx([2.1] * len(answers))
    cut = [begin + right for begin in TAGS] + [start.format("analysis") + right, "analysisD" + right]
    assert score("paper", cut) == [0.0] * len(cut)
    assert score("paper", [f"<r>{right}", f"<r>{draft}</r>{right}"], tags=("<r>", "</r>")) == pytest.approx([0.0, 2.1])
    assert score("paper", [right, f"{draft}</think>{right}"], opened=True) == pytest.approx([0.0, 2.1])
    columns = {name: [value] for name, value in {**HUMANEVAL, "problem": PROMPT}.items()}
    assert code_reward([f"{PROMPT}<think>\n"], [right], **columns) == [0.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "row 1: there is no column"),
        ({**HUMANEVAL, "problem": "Double x."}, "into the column `problem`"),
        ({**HUMANEVAL, "test": "def check(candidate):\n    pass\n"}, "row 1: the test has no assert that can fail"),
        ({**HUMANEVAL, "test": "print(double(1))"}, "row 1: the test has no assert that can fail"),
        ({**HUMANEVAL, "test": "def check(candidate:\n"}, "row 1: the test is not Python source"),
        ({**HUMANEVAL, "test": None}, "row 1: the test has no assert"),
        ({"task_id": 7, **MBPP, "test_imports": ["imprt math"]}, "row 1: the test is not Python source"),
    ],
)
def test_columns_that_are_missing_or_malformed(row, message):
    with pytest.raises(ValueError, match=message):
        code_reward([PROMPT] * 3, ANSWERS, **columns(row))
    with pytest.raises(ValueError, match="Unknown kind"):
        CodeRewardFunction(kind="best")


def test_trl_trains_on_it(tmp_path):
    settings = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8}
    args = GRPOConfig(str(tmp_path), **SHORT, **settings)
    items = Dataset.from_list([{"prompt": PROMPT, **HUMANEVAL}] * 4)
    trainer = GRPOTrainer(tiny_llama(), code_reward, args, items, processing_class=byte_tokenizer())
    trainer.train()
    assert trainer.state.log_history[0]["rewards/code_reward/mean"] == 0.0

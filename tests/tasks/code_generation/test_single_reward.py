"""The code reward as a reward function of TRL."""

import pickle

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

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


def test_an_answer_may_continue_the_prompt():
    body, wrong, lead = "    return 2 * x\n", "    y = 2 * x\n", "    y = 2\n    return y * x\n\nprint(double(1))"
    completions = [body, lead, wrong, f"{PROMPT}{body}", "I would double it."]
    columns = {name: [value] * 5 for name, value in HUMANEVAL.items()}
    rewards = CodeRewardFunction(kind="paper")([PROMPT] * 5, completions, **columns)
    assert rewards == pytest.approx([2.1, 2.1, 0.0, 2.1, 0.0])


@pytest.mark.parametrize(
    ("row", "message"),
    [({}, "row 1: there is no column"), ({**HUMANEVAL, "problem": "Double x."}, "into the column `problem`")],
)
def test_columns_that_are_missing(row, message):
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

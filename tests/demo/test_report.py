import contextlib
import io
import re
from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from trl_multiagent.code.sandbox import Sandbox
from trl_multiagent.configs.recipes.demo.model import write_aux, write_main
from trl_multiagent.configs.recipes.demo.problems import demo_dataset, demo_problems, demo_prompts
from trl_multiagent.configs.recipes.demo.report import DemoReport
from trl_multiagent.environments.base import Outcome, Turn


ITEMS = demo_dataset("test").select(range(12))
PROBLEMS = {problem.name: problem for problem in demo_problems("test")}


class ScriptedTrainer:
    """
    A trainer whose team follows the conventions it is told, and whose rewards are 4 for a match and 1 for a clash.
    """

    def __init__(self, output_dir):
        self.args = SimpleNamespace(output_dir=str(output_dir), disable_tqdm=False)
        self.state = SimpleNamespace(global_step=30)
        self.conventions = [("A", "B")]
        self.accelerator = Accelerator()
        self.environment = SimpleNamespace(unwrapped=SimpleNamespace(sandbox=Sandbox()), answers=lambda action: action)

    def collaborate(self, items, num_episodes):
        turns = []
        for item in items:
            for episode in range(num_episodes):
                aux, main = self.conventions[episode % len(self.conventions)]
                problem = PROBLEMS[item["entry_point"]]
                answers = {"aux": write_aux(problem, aux), "main": write_main(problem, main) + "# \x1b[2J\r"}
                match = aux == main
                paper, earned, passed = (4.0, 3.9, 1.0) if match else (1.0, 0.9, 0.25)
                metrics = {"paper_reward": paper, "earned_reward": earned, "test_pass_rate": passed}
                outcome = Outcome(earned, {**metrics, "size_share": passed / 2.5})
                turns.append([Turn(demo_prompts(item), answers, outcome)])
        return turns


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> tuple[str, ScriptedTrainer]:
    """What a report prints: all clash before, after it half the answers follow A, a quarter B, a quarter clash."""
    trainer = ScriptedTrainer(tmp_path_factory.mktemp("run"))
    report = DemoReport(ITEMS, num_episodes=4)
    report.before(trainer)
    trainer.conventions = [("A", "A"), ("B", "B"), ("A", "A"), ("B", "A")]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        report.on_train_end(trainer.args, trainer.state, None)
    return printed.getvalue(), trainer


def test_table_compares_before_and_after(shown):
    rows = dict(re.findall(r"^ *(\S.*?) {2,}(\S+ +\S+)$", shown[0], flags=re.MULTILINE))
    rows = {name: values.split() for name, values in rows.items()}
    assert rows["12 held-out problems, 4 sampled answers each"] == ["before", "after"]
    assert rows["joint reward (0 to 4)"] == ["1.00", "3.25"]
    assert rows["tests passed"] == ["25%", "81%"]
    assert rows["size share of the smaller part (0 to 0.5)"] == ["0.10", "0.33"]
    assert rows["both agents follow the same convention"] == ["0%", "75%"]
    assert rows["A: aux keeps, main maps"] == ["0%", "50%"]
    assert rows["B: aux keeps and maps"] == ["0%", "25%"]


def test_sample_answer_and_width(shown):
    text, item = shown[0], ITEMS[0]
    problem = PROBLEMS[item["entry_point"]]
    sample = text[text.index(f"Sample answer: {item['entry_point']}") :]
    assert "before: reward 1.00, 25% of the tests" in sample and "after: reward 4.00, 100% of the tests" in sample
    before, after = sample.split("after: ")
    left, right = write_main(problem, "B").splitlines()[1], write_main(problem, "A").splitlines()[1]
    assert left in before and right in after
    assert "# ·[2J·" in text and "\x1b" not in text and "\r" not in text
    assert max(len(line) for line in text.splitlines()) <= 100

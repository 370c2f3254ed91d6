from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

import trl_multiagent
from trl_multiagent.evaluation.config import EvaluationConfig
from trl_multiagent.evaluation.metrics import Result
from trl_multiagent.evaluation.play import Policy
from trl_multiagent.evaluation.report import Report, draw
from trl_multiagent.report.pictures import draw_curve, draw_intervals, picture
from trl_multiagent.report.tables import markdown_table, text_table


def test_one_module_draws():
    package = Path(trl_multiagent.__file__).parent
    assert [path.name for path in package.rglob("*.py") if "matplotlib" in path.read_text()] == ["pictures.py"]


@pytest.mark.parametrize("number", [1, 10, 19, 20, 100])
def test_a_curve_is_not_delayed_by_its_smoothing(number):
    """The mean of a straight line is that line, but for the ends; a short curve is drawn as it is."""
    axes = Figure().subplots()
    steps = list(range(number))
    draw_curve(axes, steps, [0.5 * step for step in steps], "training")
    drawn = axes.lines[-1].get_ydata()
    reach = 0 if number < 20 else min(5, number // 10)
    assert list(drawn[reach : number - reach]) == pytest.approx([0.5 * k for k in range(reach, number - reach)])
    assert len(axes.lines) == (1 if number < 20 else 2)


def test_a_picture_is_whole_or_not_there(tmp_path):
    path = tmp_path / "new" / "picture.png"
    with pytest.raises(ZeroDivisionError), picture(path):
        _ = 1 / 0
    assert not path.parent.exists()
    with picture(path, panels=2, size=(2, 1)) as (left, right):
        for axes in (left, right):
            axes.plot([0, 1], label="same")
    assert imread(path).shape[:2] == (150, 600)
    (legend,) = left.figure.legends  # below the panels, not on a curve
    assert [text.get_text() for text in legend.get_texts()] == ["same"]


def test_intervals_of_missing_values_are_left_out():
    axes = Figure().subplots()
    draw_intervals(
        axes, [{"turn 1": (1.0, 0.5, 2.0), "turn 2": None}, {"turn 1": (3.0, np.nan, np.nan), "turn 2": None}]
    )
    assert [0.5, 2.0] in [list(line.get_xdata()) for line in axes.lines]
    assert [line.get_label() for line in axes.lines if not line.get_label().startswith("_")] == ["turn 1", "turn 2"]


def test_the_picture_of_an_evaluation_says_what_it_shows(tmp_path, monkeypatch):
    config = EvaluationConfig(num_episodes=2, k=[1], num_bootstraps=100, confidence=0.9)
    columns = [("turn_1", "reward"), ("turn_1", "pass@1"), ("final", "pass@1")]
    values = np.random.default_rng(0).random((7, 3))
    result = Result(Policy("team", "team", None, None, 6), columns, values, {"episodes": 14, "generated_tokens": 70})
    figures = []

    def savefig(figure, path, **kwargs):
        figures.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", savefig)
    draw(Report(config, [result], 7), tmp_path / "evaluation.png")
    title = figures[0].get_suptitle()
    assert "7 items, 2 episodes each" in title and "90% intervals over items" in title


def test_tables():
    rows = [["a", "number", "x"], ["long name", "1", "2.50"]]
    assert text_table(rows) == ["a          number     x", "-----------------------", "long name       1  2.50"]
    assert markdown_table([["a", "b"], ["x|y", 0.5]]) == "| a | b |\n| --- | --- |\n| x\\|y | 0.5 |\n"

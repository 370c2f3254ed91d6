from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

import trl_multiagent
from trl_multiagent.console import markdown_table, text_table
from trl_multiagent.report.pictures import draw_curve, picture


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


def test_tables():
    rows = [["a", "number", "x"], ["long name", "1", "2.50"]]
    assert text_table(rows) == ["a          number     x", "-----------------------", "long name       1  2.50"]
    assert markdown_table([["a", "b"], ["x|y", 0.5]]) == "| a | b |\n| --- | --- |\n| x\\|y | 0.5 |\n"

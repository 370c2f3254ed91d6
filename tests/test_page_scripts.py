"""What the scripts of a report compute, in V8 without a browser: charts, trees, filters, drawings, colours."""

import json
import math
import time

import pytest
from py_mini_racer import MiniRacer

from trl_multiagent.report.html import PAGE, SCRIPTS, json_values
from trl_multiagent.report.run_page import tree_page


@pytest.fixture(scope="module")
def call():
    """Calls a function of `logic.js` with plain values, as JSON."""
    context = MiniRacer()
    context.eval((PAGE / "logic.js").read_text(encoding="utf-8"))
    return lambda script, *values: json.loads(
        context.eval(f"JSON.stringify(({script})(...{json.dumps(json_values(values))}))")
    )


# As much of a browser as a page needs until it is shown
BROWSER = """
class Element {
  constructor(tag) { Object.assign(this, {tag, children: [], style: {}, attributes: {}, value: ""}); }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener() {}
  contains(other) { return this.all.includes(other); }
  set textContent(text) { this.children = [text]; }
  get text() { return this.children.map(child => child instanceof Element ? child.text : String(child)).join(" "); }
  get all() { return [this, ...this.children.flatMap(child => child instanceof Element ? child.all : [])]; }
}
const errors = [], found = {h1: new Element(), main: new Element(), nav: new Element()};
globalThis.console = {error: error => errors.push(error.message)};
globalThis.document = new Element();
document.createElement = tag => new Element(tag);
document.createElementNS = (_, tag) => new Element(tag);
document.querySelector = name => found[name];
document.getElementById = () => ({textContent: DATA});
globalThis.matchMedia = () => ({addEventListener() {}});
globalThis.addEventListener = () => {};
globalThis.IntersectionObserver = class { observe() {} };
globalThis.URLSearchParams = class { has() { return false; } };
globalThis.location = {hash: "", href: ""};
globalThis.history = {replaceState() {}};
"""


def shown(data):
    """Returns the texts of the sections of a page, by title, its squares as colours and marks, and its errors."""
    page = {"title": "A run", "alarms": [], "groups": [""], **data}
    context = MiniRacer()
    context.eval(BROWSER.replace("DATA", json.dumps(json.dumps(json_values(page)))))
    for name in SCRIPTS[1:]:  # without the library that draws charts
        context.eval((PAGE / name).read_text(encoding="utf-8"))
    script = (
        "[Object.fromEntries(found.main.children.map(x => [x.children[0].text, x.text])), found.main.all.filter(x => "
        "x.tag === 'rect').map(x => x.attributes.style), found.main.all.filter(x => x.attributes.class === 'mark')"
        ".map(x => x.text), errors]"
    )
    return json.loads(context.eval(f"JSON.stringify({script})"))


def row(node="/", action=0, reward=0.0, **more):
    turn = 1 + len(node.strip("/").split("/")) * (node != "/")
    parent = "" if node == "/" else node.rpartition("/")[0] or "/"
    own = {"step": 1, "split": "train", "process": 0, "tree": 0, "item": "Item 7", "node": node, "parent": parent}
    own |= {"turn": turn, "action": action, "reward": reward, "return": 2 * reward, "prompt/aux": f"p{node}"}
    return {**own, "completion/aux": f"{node}{action}", "metrics/tests/passed": reward, **more}


TREE = [row(action=0, reward=1.0), row(action=1, reward=3.0), row("/1", 0, 4.0)]
TREE.append(row("/1", 1, 0.0, **{"extra/suspicious": "x"}))


def test_trees(call):
    page = tree_page([[{**TREE[3], **x} for x in TREE]])
    tree = call(
        "page => { const tree = treeOf(page.trees[0], page.columns); return {own: [tree.low, tree.high, tree.value, "
        "tree.id], nodes: tree.nodes.map(node => [node.key, node.turn, page.texts[node.prompts.aux], "
        "node.actions.length]), "
        "next: tree.actions.map(action => child(action)?.key ?? null), before: actionBefore(tree.nodes[1]).action, "
        "passed: tree.actions.map(action => action.metrics['tests/passed'])} }",
        page,
    )
    assert tree == {
        "own": [0, 4, 4, "train-1-0-0"],  # the value is the mean return of the first turn
        "nodes": [["/", 1, "p/", 2], ["/1", 2, "p/1", 2]],
        "next": [None, "/1", None, None],
        "before": 1,
        "passed": [1, 3, 4, 0],
    }


def test_trees_are_compared_with_all_of_a_run(call):
    narrow = [row(action=0, reward=2.0, tree=1, name="milk"), row(action=1, reward=2.0, tree=1, name="milk")]
    narrow[1]["completion/aux"] = narrow[0]["completion/aux"]  # both gave the same answer
    page = tree_page([[{**TREE[3], "name": None, **x} for x in tree] for tree in (TREE, narrow, [*TREE[:1]])])
    script = (
        "page => { const trees = page.trees.map(rows => treeOf(rows, page.columns)); "
        "return [scalesOf(trees), trees.indexOf(widest(trees)), trees.map(tree => tree.name), "
        "trees.map(tree => alike(tree.nodes[0]).map(equal => equal.map(one => one.action)))] }"
    )
    scales, opened, names, groups = call(script, page)
    assert scales == {"reward": [0, 4], "return": [0, 8]} and opened == 0
    assert names == ["Item 7", "milk", "Item 7"] and groups == [[[0], [1]], [[0, 1]], [[0]]]


def test_trees_that_earn_at_the_end_are_coloured_by_return(call):
    page = tree_page([[{**x, "reward": 0.0} if x["turn"] == 1 else x for x in TREE]])
    script = (
        "page => { const tree = treeOf(page.trees[0], page.columns); "
        "return [tree.shown, tree.low, tree.high, middling(tree).map(action => action.reward)] }"
    )
    early = tree_page([TREE])
    assert call(script, page) == ["return", 0, 8, [0, 4]]
    assert call(script, early)[0] == "reward"


def test_episodes_are_trees_of_their_own(call):
    rows = [row(node, episode=k) for k in range(2) for node in ("/", "/0")]
    page = tree_page([rows])
    script = "page => treeOf(page.trees[0], page.columns).nodes.map(node => [node.key, parentOf(node)?.key ?? null])"
    assert call(script, page) == [["e0/", None], ["e0/0", "e0/"], ["e1/", None], ["e1/0", "e1/"]]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"low": "1", "high": "3"}, [0, 1]),
        ({"low": "0"}, [0, 1, 2, 3]),
        ({"turn": "2"}, [2, 3]),
        ({"suspicious": True}, [3]),
        ({"item": "ITEM"}, [0, 1, 2, 3]),
        ({"item": "8"}, []),
    ],
)
def test_filters(call, wanted, expected):
    page = tree_page([[{"extra/suspicious": None, **x} for x in TREE]])
    script = "(page, wanted) => treeOf(page.trees[0], page.columns).actions.map(action => fits(action, wanted))"
    fits = call(script, page, {"low": "", "high": "", "turn": "", "item": "", "suspicious": False, **wanted})
    assert [k for k, fitting in enumerate(fits) if fitting] == expected


@pytest.mark.parametrize("siblings", [4, 9])
def test_no_two_squares_of_a_drawing_overlap(call, siblings):
    nodes = ["/", *(f"/{k}" for k in range(siblings)), *(f"/1/{k}" for k in range(siblings))]
    page = tree_page([[row(node, action) for node in nodes for action in range(siblings)]])
    drawing, squares = call(
        "page => { const tree = treeOf(page.trees[0], page.columns); return [place(tree), tree.actions.map(({x, "
        "y, node}) => [x, y, node.turn])] }",
        page,
    )
    for k, (x, y, turn) in enumerate(squares):
        assert 0 <= x <= drawing["width"] - drawing["size"] and 0 <= y <= drawing["height"] - drawing["size"]
        assert drawing["left"][turn] <= x
        for other_x, other_y, _ in squares[:k]:
            assert max(abs(x - other_x), abs(y - other_y)) >= drawing["size"]


def test_charts(call):
    curve, other, third = ({"step": [1, 2], "mean": [0.0, end]} for end in (1.0, 2.0, 3.0))
    metrics = {
        "turn_1/passed": [curve],
        "turn_2/passed": [{"step": [2], "mean": [5.0]}],
        "eval_easy_turn_1/passed": [{"step": [2], "mean": [3.0]}],
        "turn_1/aux_used": [other],
        "lowest_grade": [{"step": [1, 2], "mean": [4.0, 5.0]}],
        "agents/aux/loss": [curve],
        "time/update": [curve],
        "critics/central/value_loss": [curve],
        "lr": [curve],
        "reward": [third],
        "return": [third],
        "beta": [{"step": [1, 2], "mean": [0.5, 0.5]}],
    }
    charts, constant = call("chartsOf", metrics, [""])
    found = [(chart["section"], chart["title"], [line["label"] for line in chart["lines"]]) for chart in charts]
    assert found == [
        ("Reward", "return", ["training"]),
        ("Solved", "passed", ["turn 1", "turn 2", "turn 1, evaluation easy"]),
        ("Parts of the reward", "aux used", ["turn 1"]),
        ("Parts of the reward", "lowest grade", ["training"]),
        ("Agents", "loss", ["aux"]),
        ("Agents", "critic: value loss", ["central"]),
        ("Training", "lr", ["training"]),
        ("Time and tokens", "seconds of a step", ["update"]),
    ]
    assert charts[1]["x"] == [1, 2] and charts[1]["lines"][1]["mean"] == [None, 5]
    assert charts[0]["also"] == ["reward"] and call("charts => mainChart(charts).title", charts) == "return"
    assert constant == [["beta", "0.5"]]
    assert call("charts => ownChart(charts).title", charts) == "passed"
    assert call("charts => ownChart(charts) ?? null", charts[:1]) is None
    two, _ = call("chartsOf", {"reward": [curve, {"step": [2, 4], "mean": [7.0, 8.0]}]}, ["team", "single"])
    lines = [(line["label"], line["mean"]) for line in two[0]["lines"]]
    assert lines == [("team", [0, 1, None]), ("single", [None, 7, 8])]


def test_the_chart_of_the_tasks_own_number(call):
    script = (
        "metrics => { const chart = ownChart(chartsOf(metrics, [''])[0]); "
        "return chart ? `${chart.section}: ${chart.title}` : null }"
    )

    def own(*names):
        metrics = {name: [{"step": [1, 2], "mean": [0.0, float(k)]}] for k, name in enumerate(names, start=1)}
        return call(script, metrics)

    of_every_task = ["turn_1/early_terminated", "turn_1/reward_none", "turn_1/out_of_turns", "episode/length"]
    of_every_task += ["episode/out_of_turns", "episode/reward_none", "episode/rewards/play"]
    assert own(*of_every_task) is None
    assert own(*of_every_task, "turn_1/aux_used") == "Parts of the reward: aux used"
    assert own(*of_every_task, "turn_1/aux_used", "turn_1/passed") == "Solved: passed"
    assert own(*of_every_task, "turn_1/passed", "episode/rounds") == "Episodes: rounds"
    assert own("turn_1/passed", "episode/rounds", "episode/tests_passed") == "Episodes: tests passed"


def test_the_return_of_an_evaluation_is_drawn(call):
    curve, other = ({"step": [1, 2], "mean": [0.0, end]} for end in (1.0, 2.0))
    metrics = {"turn_1/expected_return": [curve], "return": [curve], "reward": [curve]}
    metrics |= {f"eval_{name}": [other] for name in ("turn_1/expected_return", "return", "reward")}
    metrics["critics/central/target_mean"] = [curve]
    charts, _ = call("chartsOf", metrics, [""])
    found = [(chart["title"], [line["label"] for line in chart["lines"]], chart["also"]) for chart in charts]
    assert found == [
        ("return", ["training", "evaluation"], ["expected return", "reward"]),
        ("critic: target mean", ["central"], []),
    ]


def test_joint_actions_without_a_reward(call):
    nothing = {"reward": math.nan, "return": math.nan}
    dropped = [row(action=0, **nothing), row(action=1, reward=-3.0), row("/1", 0, -4.0), row("/1", 1, **nothing)]
    page = tree_page([dropped, [{**x, **nothing} for x in dropped]])
    script = (
        "page => { const trees = page.trees.map(rows => treeOf(rows, page.columns)); const any = {low: '', high: '', "
        "turn: '', item: ''}; return [scalesOf(trees), scalesOf(trees.slice(1)), trees.map(tree => [tree.low, "
        "tree.high, tree.value, middling(tree).map(action => action.action)]), trees.indexOf(widest(trees)), "
        "trees[0].actions.map(action => [fits(action, any), fits(action, {...any, low: '-9'}), "
        "fits(action, {...any, high: '9'})])] }"
    )
    scales, no_scales, trees, opened, fitting = call(script, page)
    assert scales == {"reward": [-4, -3], "return": [-8, -6]}
    assert no_scales == {"reward": [None, None], "return": [None, None]} and opened == 0
    assert trees == [[-8, -6, -6, [1, 0]], [None, None, None, [1, 1]]]
    assert fitting == [[True, False, False], [True] * 3, [True] * 3, [True, False, False]]


def test_a_page_shows_joint_actions_without_a_reward():
    rows = [row(action=k, reward=reward) for k, reward in enumerate([1.0, math.nan, 3.0])]
    sections, squares, marks, errors = shown({"trees": tree_page([rows]), "configuration": "seed: 1"})
    assert [*sections] == ["Rollouts", "Details"] and errors == []
    assert marks == ["1", "–", "3"] and squares[1] == "fill: var(--back)" and "color-mix" in squares[0]
    sections, _, marks, errors = shown({"trees": tree_page([rows[1:2]])})
    assert marks == ["–"] and errors == [] and "mean return –" in sections["Rollouts"]


def test_a_section_that_fails_leaves_the_others():
    sections, _, _, errors = shown({"table": [], "alarms": None, "trees": tree_page([TREE]), "configuration": "seed"})
    assert [*sections] == ["Summary", "Rollouts", "Details"] and len(errors) == 1
    assert f"This section cannot be shown: {errors[0]}" in sections["Summary"]


def test_an_evaluation_says_that_episodes_without_a_reward_are_left_out():
    def text(share):
        turn = {"return": {"mean": 1.0, "low": None, "high": None}, "reward_none": {"mean": share}}
        team = {"kind": "team", "results": {"turn_1": turn, "final": turn}, "cost_per_episode": {}}
        settings = {"num_episodes": 1, "confidence": 0.95}
        sections, _, _, errors = shown({"evaluation": {"items": 2, "settings": settings, "policies": {"team": team}}})
        assert errors == []
        return sections["Evaluation"]

    assert "each. Episodes without a reward are left out of the means" in text(0.5)
    assert "left out" not in text(0.0)


def test_an_evaluation_shows_texts_of_settings_and_nothing_for_numbers_that_are_not_known():
    nothing = dict.fromkeys(("mean", "low", "high", "t_low", "t_high"))
    team = {"kind": "team", "results": {"final": {"pass@1": nothing}}, "cost_per_episode": {}}
    settings = {"num_episodes": 1, "confidence": 0.95, "stop_strings": {"aux": ["."]}}
    found = {"matrices": {"aux": [[None, 1.0], [0.5, None]]}, "diagonal": nothing, "off_diagonal": nothing}
    evaluation = {"items": 2, "settings": settings, "policies": {"team": team}}
    evaluation |= {"cross_play": {"pass@1": found, "runs": ["a", "b"]}}
    sections, _, _, errors = shown({"evaluation": evaluation})
    assert errors == [] and "0.0%" not in sections["Evaluation"] and "0.500" in sections["Evaluation"]
    assert '{"aux":["."]}' in sections["Evaluation"] and "object Object" not in sections["Evaluation"]


def test_the_page_of_preferences_names_its_steps_and_has_each_chart_once():
    metrics = {"eval_accuracy": [{"step": [1, 2], "mean": [0.0, 1.0]}]}
    facts = {"step": 2, "max_steps": 2, "finished": True, "agents": {"aux": "m"}, "started": "2026-01-01T10:00:00"}
    facts |= {"env_step": 8, "settings": {}, "versions": {}, "algorithm": "MADPO"}
    sections, _, _, errors = shown({"table": [["metric"]], "facts": facts, "metrics": metrics})
    assert errors == [] and sections["Learning"].count("accuracy") == 1
    assert "Env steps 8" in sections["Summary"] and "joint actions" not in sections["Summary"]


def test_a_run_whose_return_never_changes_shows_what_was_learnt():
    metrics = {"return": [{"step": [1, 2], "mean": [0.0, 0.0]}]}
    lone, *_ = shown({"metrics": metrics})
    assert "Learning" not in lone
    metrics["episode/rounds"] = [{"step": [1, 2], "mean": [0.0, 1.0]}]
    trees = tree_page([TREE, [{**x, "step": 9} for x in TREE]])
    sections, _, _, errors = shown({"metrics": metrics, "example": trees})
    assert errors == [] and "Step 9: return" in sections["Learning"] and "rounds" in sections["Learning"]


def test_smoothing_and_numbers(call):
    assert call("smoothed", [1.0] * 19) is None
    values = [0.0, 3.0, None, *[1.0] * 17]
    assert call("smoothed", values)[:4] == [1.5, 1.5, None, 1]
    shown = [call("show", x) for x in (None, 0.0, 1234567, 0.123456, 12345.678, 0.00012345, "text")]
    assert shown == ["–", "0", "1,234,567", "0.1235", "12,346", "0.000123", "text"]


def test_python_has_colours(call):
    text = "@cache\ndef aux(x2):\n    return print(x2, 3.5e1, \"a # b\", '''c\n\"d''')  # in f(1)\nif_x = None"
    pieces = call("coloured", text)
    assert "".join(piece for _, piece in pieces) == text
    found = [(kind, piece) for kind, piece in pieces if kind]
    assert found[:5] == [("k", "def"), ("f", "aux"), ("k", "return"), ("f", "print"), ("n", "3.5e1")]
    assert found[5:7] == [("s", '"a # b"'), ("s", "'''c\n\"d'''")]
    assert found[7:] == [("c", "# in f(1)"), ("k", "None")]
    assert call("coloured", "Write a sentence (in English).") == [["", "Write a sentence (in English)."]]


@pytest.mark.parametrize("piece", ["x", "\n", " ", '"', "'''", "\\", "(", "# ", "for ", "1", "x("])
def test_colours_of_long_texts_are_quick(call, piece):
    start = time.process_time()  # other programs do not count
    call("coloured", "def f():\n" + piece * 200_000)  # 0.1 s; minutes if the time grew with the square of the length
    assert time.process_time() - start < 5

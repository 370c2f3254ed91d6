"""The documentation site is built without a warning, and the notebook of the quickstart runs."""

import json
import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from py_mini_racer import MiniRacer


ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """
    The pages of the site as HTML, by their address. A warning of MkDocs, such as a link without a target, is an error.
    """
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    (search,) = (folder / "assets" / "javascripts" / "workers").glob("search.*.js")
    return {
        path.relative_to(folder).as_posix().removesuffix("index.html"): path.read_text()
        for path in [*folder.rglob("*.html"), folder / "search" / "search_index.json", search]
    }


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    families = {f"recipes/{path.parent.name}" for path in (ROOT / "recipes").glob("*/README.md")}
    assert {
        f"{page}/" for page in (pages - {"index"}) | families | {"quickstart", "CHANGELOG", "benchmarks"}
    } <= site.keys()
    for name, html in site.items():
        if name.endswith(".js"):
            continue
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]* src="(https?:[^"]+)"|<link[^>]*stylesheet[^>]* href="(https?:[^"]+)"', html
        )
        assert not loaded, name


# What people type, and the pages that may come first
SEARCHES = {
    "custom reward": "workflows reward_functions",
    "LoRA": "teams",
    "resume": "checkpoints",
    "GPU memory": "out_of_memory distributed",
    "multi gpu": "distributed",
    "vllm": "vllm",
    "thinking": "reasoning",
    "tools": "tools",
    "frozen model": "teams partners",
    "judge": "reward_functions",
    "curriculum": "curricula",
    "streaming dataset": "curricula",
    "wandb": "output",
    "learning rate": "magrpo",
    "reward per role": "trees_and_episodes",
    "self-play": "partners",
    "push to hub": "hub",
    "Windows": "windows",
    "OOM": "out_of_memory",
    "why does it not learn": "alarms",
    "different models": "teams",
    "QLoRA": "out_of_memory",
    "chat template": "history",
    "num_generations": "magrpo",
    "human in the loop": "partners",
    "MCP": "mcp",
    "api key": "experts",
    "Colab": "quickstart",
    "save model": "teams",
    "inference": "in_an_app",
}


def test_the_search_finds_what_people_type(site):
    """The site's own script searches, in the engine of a browser."""
    browser = MiniRacer()
    browser.eval("var self = globalThis, hear, said; var console = {warn() {}}")
    browser.eval("function addEventListener(kind, f) { hear = f } function postMessage(message) { said = message }")
    browser.eval(next(script for path, script in site.items() if path.endswith(".js")))

    def tell(kind, data):
        browser.eval(f"hear({json.dumps({'data': {'type': kind, 'data': data}})})")
        return json.loads(browser.eval("JSON.stringify(said)"))

    tell(0, {**json.loads(site["search/search_index.json"]), "options": {}})
    wrong = {}
    for words, pages in SEARCHES.items():
        found = [result[0]["location"].partition("/")[0] for result in tell(2, words)["data"]["items"][:1]]
        if not {*found} & {*pages.split()}:
            wrong[words] = found
    assert len(SEARCHES) == 30 and len(wrong) <= 3, wrong


def test_the_search_ranks_guides_above_the_reference(site):
    boosts = {
        entry["location"]: entry.get("boost", 1) for entry in json.loads(site["search/search_index.json"])["docs"]
    }
    assert boosts["api/trainers/"] < boosts["trainers/"] and boosts["CHANGELOG/"] < boosts["checkpoints/"]


def test_questions_are_answered_from_the_home_page(site):
    answers = site[""].partition('id="how-do-i')[2].partition("<h2")[0]
    assert 20 <= answers.count("<li>") == len(re.findall(r"<li>.*?<a href", answers, flags=re.DOTALL))
    links = {link.lstrip("./") for link in re.findall(r'<a href="([^"]+)"', answers)}
    entries = json.loads(site["search/search_index.json"])["docs"]
    assert links == {
        entry["location"] for entry in entries if "tags" in entry
    }  # the search finds them by the question


def test_docstrings_become_tables_of_arguments_with_links(site):
    html = site["api/trainers/"]
    argument = (
        r"<td><strong>environment</strong></td>\s*<td><a "
        r'[^>]*href="\.\./environments/#trl_multiagent\.[\w.]+Environment"[^>]*><code>Environment</code></a>'
    )
    assert re.search(argument, html) and "<strong>Args</strong>" in html and "[`" not in html
    links = site["api/environments/"] + site["benchmarks/"]
    assert "github.com/trl-multiagent/trl_multiagent/blob/main/" in site["workflows/"] and '.py"' not in links


def test_the_notebook_of_the_quickstart_learns(tmp_path, monkeypatch, capsys):
    """Its cells run in this process: a kernel would first import the libraries again."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "quickstart"}
    for cell in json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    before, after, loaded = re.findall(r"'reader': .* reward (\S+)", capsys.readouterr().out)
    assert float(before) < 0.5 <= min(float(after), float(loaded))

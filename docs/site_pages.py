"""
Makes the documentation site from the files of the repository: a hook of MkDocs, and an extension for docstrings in the
style of Hugging Face.

The lists of docs/index.md are the navigation. They may name files outside of docs/, and a notebook. Pages are written
for GitHub: links to files that are no pages become links to the repository.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
CODE = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)


def chapters() -> dict[str, list[tuple[str, str]]]:
    """
    Returns the lists of docs/index.md: for each heading, the titles of its pages and their files, relative to docs/.
    """
    _, *parts = re.split(r"^## ", (DOCS / "index.md").read_text(), flags=re.MULTILINE)
    found = {part.partition("\n")[0]: re.findall(r"^- \[(.+?)\]\((.+?)\)", part, re.MULTILINE) for part in parts}
    return {chapter: pages for chapter, pages in found.items() if pages}


def page_of(file: str) -> str:
    """Returns the path in the site of a file of the repository."""
    if file == "README.md":
        return "overview.md"  # the home page is docs/index.md
    return (
        file.removeprefix("docs/").removesuffix("README.md").rstrip("/").removesuffix(".ipynb").removesuffix(".md")
        + ".md"
    )


def pages() -> dict[str, str]:
    """Returns the pages of the site by their files in the repository."""
    files = [posixpath.normpath(f"docs/{target}") for entries in chapters().values() for _, target in entries]
    return {file: page_of(file) for file in ["docs/index.md", *files]}


def reference_pages() -> set[str]:
    """Returns the files of the chapter of references, where pages may be long."""
    return {posixpath.normpath(f"docs/{file}") for _, file in chapters()["Reference"]}


def notebook_text(notebook: dict[str, Any]) -> str:
    """Returns the cells of a notebook and their outputs as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = "".join(output.get("text") or data.get("text/plain", []))
            image = data.get("image/png")
            parts.append(
                f"![Output of the cell above](data:image/png;base64,{image})" if image else f"```text\n{text}\n```"
            )
    return "\n\n".join(parts)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    named = pages()
    nav = [
        {chapter: [{title: named[posixpath.normpath(f"docs/{file}")]} for title, file in entries]}
        for chapter, entries in chapters().items()
    ]
    config.nav = [{"Home": "index.md"}, *nav]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file, page in pages().items():
        if file.endswith(".ipynb"):
            content = notebook_text(json.loads((ROOT / file).read_text()))
            files.append(File.generated(config, page, content=content))
        elif not file.startswith("docs/"):
            files.append(File.generated(config, page, content=(ROOT / file).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    sources = {name: file for file, name in pages().items()}
    folder = posixpath.dirname(sources[page.file.src_uri])
    if sources[page.file.src_uri] in reference_pages():
        page.meta["search"] = {"boost": 0.5}  # below guides, which have fewer of the words

    def rewritten(text: str) -> str:
        return LINK.sub(lambda link: target(link[1], folder, page, config), list_paragraphs(text))

    return "".join(part if CODE.fullmatch(part) else rewritten(part) for part in CODE.split(markdown))


def questions() -> dict[str, str]:
    """Returns what docs/index.md asks under "How do I ...", by the address of the page or section that answers."""
    text = re.search(r"## How do I \.\.\.\n(.*?)\n## ", (DOCS / "index.md").read_text(), re.DOTALL)[1]
    found = {}
    for question in re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]:
        words = " ".join(re.sub(r"\]\(.*?\)|[\[?,]", "", question).split())
        for file, anchor in re.findall(r"\]\(([^)#]+)(#[^)]+)?\)", question):
            found[page_of(posixpath.normpath(f"docs/{file}")).removesuffix(".md") + "/" + anchor] = words
    return found


def on_post_build(config: MkDocsConfig) -> None:
    """The search finds the answer to a question by the question's words, which count as much as a title's."""
    index = Path(config.site_dir, "search", "search_index.json")
    content = json.loads(index.read_text())
    asked = questions()
    for entry in content["docs"]:
        if entry["location"] in asked:
            entry |= {"tags": [asked[entry["location"]]], "boost": 2 if "#" in entry["location"] else 1}
    index.write_text(json.dumps(content))


def list_paragraphs(text: str) -> str:
    """
    Indents paragraphs in numbered lists as Python-Markdown wants it: by four spaces, and with an empty line before the
    next number.
    """
    text = re.sub(r"^   (?=\S)", "    ", text, flags=re.MULTILINE)
    return re.sub(r"(\n\n(?:    [^\n]*\n)+)(?=\d+\. )", r"\1\n", text)


def target(link: str, folder: str, page: Page, config: MkDocsConfig) -> str:
    """Returns where a link of a page leads in the site: to a page, to a picture, or to a file in the repository."""
    file = posixpath.normpath(posixpath.join(folder, link))
    if file in pages() or file.startswith("docs/images/"):
        name = pages().get(file, file.removeprefix("docs/"))
        return posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".")
    if not (ROOT / file).exists():
        return link  # MkDocs reports it
    return f"{config.extra['social'][0]['link']}/{'tree' if (ROOT / file).is_dir() else 'blob'}/main/{file}"


def documented() -> dict[str, str]:
    """Returns the full names of what the pages of the API describe, by the last part of the names."""
    text = "".join(path.read_text() for path in sorted((DOCS / "api").glob("*.md")))
    return {name.rpartition(".")[2]: name for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)}


class HuggingFaceDocstrings(griffe.Extension):
    """
    Makes Markdown of docstrings: of their sections, of their arguments, and of references such as
    [`~MAGRPOTrainer.agent_loss`].
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = docstring_markdown(obj.docstring.value, documented())


def docstring_markdown(text: str, names: dict[str, str]) -> str:
    """Returns a docstring as Markdown, with its arguments in tables."""
    lines, section = [], ""
    for line in text.splitlines():
        heading = re.fullmatch(r"(Args|Parameters|Returns|Yields|Raises|Example|Examples):", line)
        if heading:
            section = heading[1]
            lines += ["", f"**{section}**", ""]
            if section in ("Args", "Parameters"):
                lines += ["| argument | type | |", "| --- | --- | --- |"]
            continue
        if line and not line.startswith(" "):
            section = ""
        if section in ("Args", "Parameters") and line:
            argument = re.fullmatch(r"    (\*{0,2}\w+) \((.*?)\):(?: (.*))?", line)
            cells = [f"**{argument[1]}**", argument[2], argument[3] or ""] if argument else [line.strip()]
            cell = " | ".join(x.replace("|", r"\|") for x in cells)
            if argument:
                lines.append(f"| {cell} |")
            else:  # the description goes on
                lines[-1] = f"{lines[-1].removesuffix('|')}{cell} |"
            continue
        lines.append(line.strip() if section in ("Returns", "Yields", "Raises") else line)
    return re.sub(r"\[`(~?)([\w.]+)`\]", lambda match: reference(match[1], match[2], names), "\n".join(lines))


def reference(tilde: str, name: str, names: dict[str, str]) -> str:
    """Returns a link to what a docstring refers to, or its name alone if no page describes it."""
    shown = name.rpartition(".")[2] if tilde else name
    for part in name.split("."):
        if part in names:
            return f"[`{shown}`][{names[part]}]"
    return f"`{shown}`"

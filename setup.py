"""Gives package indexes a README with absolute links. In the repository, the links are relative."""

import re
from pathlib import Path

from setuptools import setup


ROOT = Path(__file__).parent
REPOSITORY = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def absolute_links(text: str) -> str:
    text = re.sub(r"(!\[[^]]*\]\()(?!\w+:|#)", rf"\1{REPOSITORY}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!\w+:|#)", rf"\1{REPOSITORY}/blob/main/", text)


setup(
    long_description=absolute_links((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)

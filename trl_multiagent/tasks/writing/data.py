"""Posts and abstracts to write about, as rows with the same columns."""

from trl_multiagent.environments.dataset_rows import ID_COLUMNS, Dataset, check_fields, make_dataset
from trl_multiagent.environments.embedded import generated_rows
from trl_multiagent.environments.functions import Rows
from trl_multiagent.tasks.writing.demo import SIZES, make_posts
from trl_multiagent.tasks.writing.words import key_words


COLUMNS = {"tldr": "prompt", "arxiv": "abstract_text"}  # the column with the source, for each kind of data
KINDS = tuple(COLUMNS)
DEMO = "demo"  # generated posts


def infer_kind(name: str) -> str:
    """Returns the kind of data that the name of a dataset says. Raises `ValueError` if it says none."""
    for kind in KINDS:
        if kind in ("tldr" if name == DEMO else name.lower()):
            return kind
    raise ValueError(f"`dataset.name` is {name!r}, which does not say the kind of its texts: set `dataset.type`.")


def load_writing_dataset(
    name: str, split: str | None = None, type: str | None = None, config: str | None = None
) -> Dataset:
    """
    Loads sources to write about.

    Args:
        name (`str`): `"demo"` for generated posts, a Hub id such as `"trl-lib/tldr"`, or the path of a local file.
        split (`str`, *optional*): Split in the syntax of `datasets`, by default `train`.
        type (`str`, *optional*): `"tldr"` for posts in the column `prompt`, `"arxiv"` for abstracts in the column
            `abstract_text`; by default inferred from `name`.
        config (`str`, *optional*): Configuration of the dataset on the Hub.

    Returns:
        `Dataset`: Columns `item_id`; `source`; `reference`, a summary that a person wrote, or `""`; `key_words`, see
        [`words.key_words`].

    Raises `ValueError` if the dataset is malformed, and `ConnectionError` if the Hub cannot be reached.
    """
    kind = type or infer_kind(name)
    rows = generated_rows(make_posts, SIZES, split) if name == DEMO else Rows(name=name, config=config).load(split)
    items = [_item(row, number, kind, name) for number, row in enumerate(rows, 1)]
    keys = key_words(item["source"] for item in items)
    return make_dataset([{**item, "key_words": k} for item, k in zip(items, keys, strict=True)], name)


def _item(row: dict, number: int, kind: str, name: str) -> dict[str, str]:
    text = row.get(COLUMNS[kind])
    if isinstance(text, list):  # an abstract as a list of sentences
        text = " ".join(map(str, text)).replace("<S>", "").replace("</S>", "")
    check_fields({COLUMNS[kind]: text}, {COLUMNS[kind]: str}, f"{name}, row {number}")
    names = [str(row[key]) for key in (*ID_COLUMNS, "article_id") if row.get(key) is not None]
    return {
        "item_id": names[0] if names else str(number - 1),
        "source": str(text).strip().removesuffix("TL;DR:").strip(),  # which ends the prompts of `trl-lib/tldr`
        "reference": str(row.get("completion") or "").strip(),
    }

"""Preferences from folders, files and the Hub."""

import pytest
from datasets import Dataset

from trl_multiagent.preferences import load_preferences
from trl_multiagent.preferences.rows import make_row


ROLES = ("aux", "main")
ROWS = [
    make_row({"aux": f"Help {k}:", "main": f"Do {k}:"}, {"aux": "a", "main": "b"}, {"aux": "c", "main": "d"}, 1.0, 0.0)
    for k in range(3)
]


def test_a_user_s_own_rows(tmp_path):
    files = {suffix: tmp_path / f"rows.{suffix}" for suffix in ("jsonl", "parquet")}
    Dataset.from_list(ROWS).to_json(files["jsonl"])
    Dataset.from_list(ROWS).to_parquet(files["parquet"])
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "rows")
    for name in (*files.values(), tmp_path / "rows"):
        assert load_preferences(str(name), ROLES).to_list() == ROWS
        assert load_preferences(str(name), ROLES, "train[1:]").to_list() == ROWS[1:]


def test_a_malformed_row_is_named_with_its_field(tmp_path):
    path = tmp_path / "rows.jsonl"
    Dataset.from_list([*ROWS, {**ROWS[0], "main_rejected": None}]).to_json(path)
    with pytest.raises(ValueError, match=r"Row 3 of `.*rows\.jsonl`: 'main_rejected' is None"):
        load_preferences(str(path), ROLES)
    with pytest.raises(ValueError, match="has no column 'critic_prompt'"):
        load_preferences(str(path), ("aux", "main", "critic"))
    path.write_text('{"aux_prompt": ')
    with pytest.raises(ValueError, match="row 1 is not JSON"):
        load_preferences(str(path), ROLES)


def test_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no file .*rows\.json"):
        load_preferences(str(tmp_path / "rows.json"), ROLES)
    with pytest.raises(FileNotFoundError, match="There are no preferences in"):
        load_preferences(str(tmp_path / "rows"), ROLES)
    (tmp_path / "rows.csv").write_text("aux_prompt")
    with pytest.raises(FileNotFoundError, match=r"rows\.csv\. Give a folder .* a \.jsonl, \.json or \.parquet file"):
        load_preferences(str(tmp_path / "rows.csv"), ROLES)
    with pytest.raises(ValueError, match="holds no dataset"):
        load_preferences(str(tmp_path), ROLES)

"""Links in the folder of a team: those that lead out of it are refused."""

import os

import pytest

from trl_multiagent import AgentTeam
from trl_multiagent.hub import team_files

from tiny import tiny_team


@pytest.mark.parametrize("part", ["team.json", "agents/aux", "agents", "agents/main/model.safetensors"])
def test_a_link_out_of_the_folder_of_a_team_is_refused(part, tmp_path):
    folder, outside = tmp_path / "team", tmp_path / "outside"
    tiny_team().save_pretrained(folder)
    (folder / part).rename(outside)
    (folder / part).symlink_to(outside)
    for load in (AgentTeam.from_pretrained, tiny_team().load_weights):
        with pytest.raises(ValueError, match=rf"{folder}/.* leads out of the team's folder: replace it by a copy"):
            load(folder)


@pytest.mark.parametrize("place", ["../other", "agents/../../other", "/tmp/other"])
def test_a_team_file_names_only_folders_of_the_team(place, tmp_path):
    tiny_team().save_pretrained(tmp_path / "team")
    path = tmp_path / "team" / "team.json"
    path.write_text(path.read_text().replace("agents/aux", place))
    for load in (AgentTeam.from_pretrained, tiny_team().load_weights):
        with pytest.raises(ValueError, match="leads out of the team's folder"):
            load(path.parent)


def test_links_of_a_cache_and_to_the_folder_of_a_team_are_followed(tmp_path):
    """
    A snapshot of the Hub's cache has links to blobs. A link to the whole folder, and one within it, are the user's
    own.
    """
    snapshot = tmp_path / "models--user--team" / "snapshots" / "a1b2"
    tiny_team().save_pretrained(snapshot)
    (blobs := snapshot.parents[1] / "blobs").mkdir()
    for k, path in enumerate([path for path in snapshot.rglob("*") if path.is_file()]):
        path.rename(blobs / str(k))
        path.symlink_to(os.path.relpath(blobs / str(k), path.parent))
    (snapshot / "agents" / "main" / "vocab.txt").symlink_to("tokenizer.json")
    (tmp_path / "mine").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "mine"):
        AgentTeam.from_pretrained(folder)
        assert len(team_files(folder)) > 8
    (snapshot / "agents" / "aux" / "loop").symlink_to("loop")
    AgentTeam.from_pretrained(snapshot)

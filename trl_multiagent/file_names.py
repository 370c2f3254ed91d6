"""Names of the files in the folders of models, teams and runs. Nothing slow is imported here, so that settings can be checked early."""

from pathlib import Path


# transformers, PEFT, datasets and the Hub decide these names
MODEL_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
CARD_FILE = "README.md"
DATASET_STATE = "state.json"  # of `Dataset.save_to_disk`
# This package decides these
TEAM_FILE = "team.json"
CRITICS_FOLDER = "critics"  # in the folder of a team
RECIPE_FILE = "config.yaml"  # the settings of a run
CURVE_FILE = "reward_curve.png"  # the picture in a team's model card
PREFERENCES_FILE = "collection.json"  # of collected preferences, written last

MODEL_FILES = (MODEL_CONFIG, ADAPTER_CONFIG, TEAM_FILE)  # a folder with a model, an adapter or a team has one of them


def holds_model(folder: Path) -> bool:
    """Whether a folder is that of a model, an adapter or a saved team."""
    return any((folder / name).is_file() for name in MODEL_FILES)


def is_collection(folder: str | Path) -> bool:
    """Whether a folder holds collected preferences, all of them."""
    return all((Path(folder) / name).is_file() for name in (DATASET_STATE, PREFERENCES_FILE))

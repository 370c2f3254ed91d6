"""Names of the files in the folders of models, teams and runs. Nothing slow is imported here, so that settings can be checked early."""

from pathlib import Path


# transformers, PEFT and the Hub decide these names
MODEL_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
CARD_FILE = "README.md"
# This package decides these
TEAM_FILE = "team.json"
RECIPE_FILE = "config.yaml"  # the settings of a run

MODEL_FILES = (MODEL_CONFIG, ADAPTER_CONFIG, TEAM_FILE)  # a folder with a model, an adapter or a team has one of them


def holds_model(folder: Path) -> bool:
    """Whether a folder is that of a model, an adapter or a saved team."""
    return any((folder / name).is_file() for name in MODEL_FILES)

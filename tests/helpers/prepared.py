from trl_multiagent.runs.prepared import PreparedRun, prepare_training
from trl_multiagent.runs.run import end_on_wrong_input, read_settings


def parse_recipe(algorithm, task, argv, prog="recipe") -> PreparedRun:
    """Reads and checks the settings of a run as a recipe does, without loading a model or data."""
    with end_on_wrong_input(prog):
        settings = read_settings(algorithm, task, argv, prog)
    return prepare_training(settings)

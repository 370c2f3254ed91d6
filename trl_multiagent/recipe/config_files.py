"""Finds the configuration files that come with the package by their names, such as `magrpo_he` or `zero3`."""

import difflib
from pathlib import Path

import trl_multiagent
from trl_multiagent.recipe.settings import ConfigError


CONFIGS = Path(trl_multiagent.__file__).parent / "configs"  # links in a checkout, copies in an installed package
RECIPES = "recipes/*/configs/*.yaml"
ACCELERATE = "accelerate/*.yaml"


def config_file(flag: str, name: str, pattern: str) -> str:
    """
    The path of a configuration file.

    Args:
        flag (`str`): The flag of the command line that names the file, for the message.
        name (`str`): A path, or the name of a file of the package without its ending.
        pattern (`str`): The files of the package to search, [`RECIPES`] or [`ACCELERATE`].

    Raises:
        ConfigError: there is no such file.
    """
    if Path(name).is_file():
        return name
    packaged = {path.stem.removesuffix("_config"): path for path in sorted(CONFIGS.glob(pattern))}
    if name in packaged:
        return str(packaged[name])
    path = Path(name)
    if path.suffix or path.name != name:
        raise ConfigError(f"{flag} {name} cannot be read: {'it is a folder' if path.is_dir() else 'no such file'}.")
    similar = difflib.get_close_matches(name, packaged, n=1)
    suggestion = f" Did you mean {similar[0]}?" if similar else ""
    raise ConfigError(
        f"{flag} {name!r} is neither a file nor the name of a configuration of this package.{suggestion} There are: "
        f"{', '.join(packaged)}."
    )

"""Recipe scripts: settings from YAML, `--override` and flags, checked before anything is loaded."""

from trl_multiagent.recipe.plan import print_plan
from trl_multiagent.recipe.recipe import Recipe, parse_recipe
from trl_multiagent.recipe.settings import ConfigError


__all__ = ["ConfigError", "Recipe", "parse_recipe", "print_plan"]

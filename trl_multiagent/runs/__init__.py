"""Recipes: settings from YAML, `--override` and flags, checked before anything is loaded; then one training run."""

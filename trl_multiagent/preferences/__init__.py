from trl_multiagent.preferences.collection import collect_preferences, load_preferences, push_preferences
from trl_multiagent.preferences.comparators import Comparator, make_comparator
from trl_multiagent.preferences.config import PreferenceConfig
from trl_multiagent.preferences.pairs import ReplayConfig, replay


__all__ = [
    "Comparator",
    "PreferenceConfig",
    "ReplayConfig",
    "collect_preferences",
    "load_preferences",
    "make_comparator",
    "push_preferences",
    "replay",
]

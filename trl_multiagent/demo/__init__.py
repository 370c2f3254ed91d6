"""
The embedded demo: problems, a base model built from nothing, and a report. No download, half a minute of set-up.

In a recipe's configuration `dataset.name: demo` and `agent_model.name: demo` select it.
"""

from trl_multiagent.demo.model import demo_model
from trl_multiagent.demo.problems import demo_dataset, demo_prompts
from trl_multiagent.demo.report import DemoReport


__all__ = ["DemoReport", "demo_dataset", "demo_model", "demo_prompts"]

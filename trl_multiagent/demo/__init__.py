"""
The embedded demo: problems, a base model built from nothing, and a report. No download, half a minute of set-up.

In the configuration of a code-generation recipe, `dataset.name: demo` and `agent_model.name: demo` select it.
"""

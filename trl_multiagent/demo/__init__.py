"""
The embedded demo: problems, a base model that is trained from scratch, and a report. It needs no download. Building
the model takes half a minute.

In the configuration of a code-generation recipe, `dataset.name: demo` and `agent_model.name: demo` select it.
"""

"""The files that `trl-multiagent init` writes: a small task to start from."""

"""The team: agents, their adapters, their files."""

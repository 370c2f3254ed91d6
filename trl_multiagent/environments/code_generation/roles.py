"""The two agents of code generation."""

AUX = "aux"  # writes the helper, which has the same name
MAIN = "main"  # writes the entry point

"""The two agents of code generation."""

AUX = "aux"  # writes the helper function, which is also named `aux`
MAIN = "main"  # writes the entry point

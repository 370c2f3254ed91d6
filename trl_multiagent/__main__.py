"""`python -m trl_multiagent` is the command `trl-multiagent`."""

from trl_multiagent.cli import main


main()

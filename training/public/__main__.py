"""`python -m routepilot` is the command `routepilot`."""

from routepilot.training.cli import main

main()

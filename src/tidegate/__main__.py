"""Lets `python -m tidegate` run the command `tidegate`."""

from tidegate.commands.cli import main

if __name__ == "__main__":
    main()

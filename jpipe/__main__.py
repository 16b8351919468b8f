"""Runs the command `jpipe` as `python -m jpipe`."""

import sys

from jpipe.view.command import main

if __name__ == "__main__":
    sys.exit(main())

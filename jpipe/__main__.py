"""Runs the command `jpipe` as `python -m jpipe`."""

import sys

from jpipe.command import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m jpipe`, the same as the command `jpipe`."""

import sys

from jpipe.view.command import main

if __name__ == "__main__":
    sys.exit(main())

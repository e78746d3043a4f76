"""`python -m dare` is the command `dare`."""

import sys

from dare.cli import main

if __name__ == "__main__":
    sys.exit(main())

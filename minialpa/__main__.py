# PYTHON_ARGCOMPLETE_OK
"""`python -m minialpa` is the command `minialpa`."""

import sys

from minialpa.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m kda`."""

import sys

from kda.cli import main

if __name__ == "__main__":  # and not in the processes that the benchmark spawns for the oracle
    sys.exit(main())

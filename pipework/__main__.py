"""`python -m pipework`."""

import sys

from pipework.cli import main

if __name__ == "__main__":
    sys.exit(main())

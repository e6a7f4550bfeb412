"""``python -m moefold`` is the command line."""

import sys

from moefold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

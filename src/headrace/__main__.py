"""Run the command line as `python -m headrace`."""

import sys

from headrace.cli import main

if __name__ == "__main__":
    sys.exit(main())

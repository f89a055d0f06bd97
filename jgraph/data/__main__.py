"""`python -m jgraph.data`: see `jgraph.cli.data`."""

import sys

from jgraph.cli.data import main

if __name__ == "__main__":
    sys.exit(main())

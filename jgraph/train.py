"""`python -m jgraph.train`: see `jgraph.cli.train`."""

import sys

from jgraph.cli.train import main

if __name__ == "__main__":
    sys.exit(main())

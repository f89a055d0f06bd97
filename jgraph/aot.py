"""`python -m jgraph.aot`: see `jgraph.cli.aot`."""

import sys

from jgraph.cli.aot import main

if __name__ == "__main__":
    sys.exit(main())

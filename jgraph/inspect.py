"""`python -m jgraph.inspect`: see `jgraph.cli.inspect`."""

import sys

from jgraph.cli.inspect import main

if __name__ == "__main__":
    sys.exit(main())

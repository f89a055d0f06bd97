"""`python -m jgraph.profile`: see `jgraph.cli.profile`."""

import sys

from jgraph.cli.profile import main

if __name__ == "__main__":
    sys.exit(main())

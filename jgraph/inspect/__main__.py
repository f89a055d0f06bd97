import sys

from jgraph.inspect import main

sys.exit(main())

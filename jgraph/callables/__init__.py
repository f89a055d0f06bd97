"""Graphed callables: one executable for each forward, dgrad and wgrad, with buffers that have an owner."""

from jgraph.callables.borrowed import Borrowed as Borrowed
from jgraph.callables.build import make_graphed_callables as make_graphed_callables
from jgraph.callables.graphed import Graphed as Graphed
from jgraph.callables.group import GraphedCallables as GraphedCallables
from jgraph.callables.group import Run as Run
from jgraph.callables.program import fold_key as fold_key

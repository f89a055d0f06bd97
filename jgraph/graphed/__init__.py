"""Graphed callables: one executable for each forward, dgrad and wgrad, with buffers that have an owner."""

from jgraph.graphed.api import make_graphed_callables as make_graphed_callables
from jgraph.graphed.borrowed import Borrowed as Borrowed
from jgraph.graphed.callable import Graphed as Graphed
from jgraph.graphed.compile import fold_key as fold_key
from jgraph.graphed.group import GraphedCallables as GraphedCallables
from jgraph.graphed.group import RunResult as RunResult

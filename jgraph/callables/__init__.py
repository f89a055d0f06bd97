"""Graphed callables: one executable for each forward, dgrad and wgrad, with buffers that have an owner."""

from jgraph.callables.api import make_graphed_callables as make_graphed_callables
from jgraph.callables.borrowed import Borrowed as Borrowed
from jgraph.callables.callable import Graphed as Graphed
from jgraph.callables.compile import fold_key as fold_key
from jgraph.callables.group import GraphedCallables as GraphedCallables
from jgraph.callables.group import RunResult as RunResult

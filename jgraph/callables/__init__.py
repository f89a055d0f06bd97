"""Graphed callables: one executable each for forward, dgrad and wgrad, with defined ownership of every buffer."""

from jgraph.callables._api import make_graphed_callables as make_graphed_callables
from jgraph.callables._borrowed import Borrowed as Borrowed
from jgraph.callables._callable import Graphed as Graphed
from jgraph.callables._compile import fold_key as fold_key
from jgraph.callables._group import GraphedCallables as GraphedCallables, RunResult as RunResult

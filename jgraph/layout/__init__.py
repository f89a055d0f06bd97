"""Layouts: how the parameters of a model are stored as the arrays of a step."""

from jgraph.layout._layout import Change, Layout, MakeLayout, alone, described, each, filled, named
from jgraph.layout._param import Description, Param
from jgraph.layout._stacked import Stacked, StackedTree
from jgraph.layout.packed import Packing, packed
from jgraph.layout.sharded import Shard, sharded

__all__ = [
    "Change",
    "Description",
    "Layout",
    "MakeLayout",
    "Packing",
    "Param",
    "Shard",
    "Stacked",
    "StackedTree",
    "alone",
    "described",
    "each",
    "filled",
    "named",
    "packed",
    "sharded",
]

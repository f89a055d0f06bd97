"""Layouts: how the parameters of a model are stored as the arrays of a step."""

from jgraph.layout.layout import Change, Layout, MakeLayout, alone, described, each, filled, named
from jgraph.layout.packed import Packing, packed
from jgraph.layout.param import Description, Param
from jgraph.layout.sharded import Shard, sharded
from jgraph.layout.stacked import Stacked, StackedTree

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

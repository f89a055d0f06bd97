"""Layouts: how the parameters of a model are stored as the arrays of a step."""

from jgraph.layout.layout import Arrays, Change, Layout, MakeLayout, alone, described, each, named
from jgraph.layout.packed import Packing, packed
from jgraph.layout.param import Param, Params
from jgraph.layout.sharded import Shard, sharded
from jgraph.layout.stacked import Stacked

__all__ = [
    "Arrays",
    "Change",
    "Layout",
    "MakeLayout",
    "Packing",
    "Param",
    "Params",
    "Shard",
    "Stacked",
    "alone",
    "described",
    "each",
    "named",
    "packed",
    "sharded",
]

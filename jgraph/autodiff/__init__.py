"""Splits a backward pass into dgrad and wgrad. Reads and replays jaxprs."""

from jgraph.autodiff._flops import product_flops as product_flops
from jgraph.autodiff._split import (
    Residuals as Residuals,
    Spec as Spec,
    Split as Split,
    Stash as Stash,
    split_backward as split_backward,
)
from jgraph.autodiff._trace import Recompute as Recompute

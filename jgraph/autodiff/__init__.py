"""Splits a backward pass into dgrad and wgrad; reads and replays jaxprs."""

from jgraph.autodiff._flops import product_flops as product_flops
from jgraph.autodiff._split import Residuals as Residuals
from jgraph.autodiff._split import Spec as Spec
from jgraph.autodiff._split import Split as Split
from jgraph.autodiff._split import Stash as Stash
from jgraph.autodiff._split import split_backward as split_backward
from jgraph.autodiff._trace import Recompute as Recompute

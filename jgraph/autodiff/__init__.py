"""A stage's backward pass in two parts: dgrad now, wgrad when there is time."""

from jgraph.autodiff.split import Residuals as Residuals
from jgraph.autodiff.split import Spec as Spec
from jgraph.autodiff.split import Split as Split
from jgraph.autodiff.split import Stash as Stash
from jgraph.autodiff.split import split_backward as split_backward

"""A stage's backward pass in two parts: dgrad now, wgrad when there is time."""

from jgraph.backward.split import Residuals as Residuals
from jgraph.backward.split import Spec as Spec
from jgraph.backward.split import Split as Split
from jgraph.backward.split import Stash as Stash
from jgraph.backward.split import split_backward as split_backward

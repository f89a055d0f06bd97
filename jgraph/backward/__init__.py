"""A stage's backward pass in two parts: dgrad now, wgrad when there is time."""

from jgraph.backward.linear import dot_general as dot_general
from jgraph.backward.stage import Residuals as Residuals
from jgraph.backward.stage import Spec as Spec
from jgraph.backward.stage import Split as Split
from jgraph.backward.stage import Stash as Stash
from jgraph.backward.stage import split_backward as split_backward

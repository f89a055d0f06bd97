"""Matrix products in FP8."""

from jgraph.precision.transform import FP8Function as FP8Function
from jgraph.precision.transform import fp8 as fp8

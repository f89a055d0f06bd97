"""Command buffers and donation: asked for through checked options, and proven from what XLA compiled.

`jgraph.graph.target` (compile for a GPU that is not here) is a program as well and is imported by its full name; so is
`jgraph.graph.explain`, which needs it and whose function is `jgraph.explain`.
"""

from jgraph.graph.capture import CaptureReport as CaptureReport
from jgraph.graph.capture import Outside as Outside
from jgraph.graph.capture import compile_and_report as compile_and_report
from jgraph.graph.launches import Launches as Launches
from jgraph.graph.launches import count_launches as count_launches
from jgraph.graph.options import compiler_options as compiler_options
from jgraph.graph.options import option_errors as option_errors
from jgraph.graph.ownership import Donation as Donation
from jgraph.graph.ownership import alias_map as alias_map
from jgraph.graph.ownership import check_identity as check_identity
from jgraph.graph.source import Op as Op

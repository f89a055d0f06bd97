"""XLA options, command buffers and donation, checked on the compiled program.

Import `jgraph.xla.aot` (compile for an absent GPU) and `jgraph.xla.explain` (which uses it) by their full names.
"""

from jgraph.xla.capture import CaptureReport as CaptureReport
from jgraph.xla.capture import Outside as Outside
from jgraph.xla.capture import compile_and_report as compile_and_report
from jgraph.xla.donation import Donation as Donation
from jgraph.xla.donation import alias_map as alias_map
from jgraph.xla.donation import check_identity as check_identity
from jgraph.xla.launches import Launches as Launches
from jgraph.xla.launches import count_launches as count_launches
from jgraph.xla.options import compiler_options as compiler_options
from jgraph.xla.source import Op as Op

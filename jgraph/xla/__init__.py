"""XLA options, command buffers and donation, checked on the compiled program.

Import `jgraph.xla.aot` (compile for an absent GPU) and `jgraph.xla.explain` (which uses it) by their full names.
"""

from jgraph.xla._capture import CaptureReport as CaptureReport, Outside as Outside, compile_and_report as compile_and_report
from jgraph.xla.donation import Donation as Donation, alias_map as alias_map, check_identity as check_identity
from jgraph.xla.hlo import Op as Op
from jgraph.xla.launches import Launches as Launches, count_launches as count_launches
from jgraph.xla.options import compiler_options as compiler_options

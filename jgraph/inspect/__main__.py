"""Inspect schedules and compiled programs before they run.

    python -m jgraph.inspect schedule zb-h1 --pp 4 --microbatches 8
    python -m jgraph.inspect schedule aligned --pp 4 --microbatches 16 --chunks 2 --costs 1,1.1,0.8
    python -m jgraph.inspect schedule my_schedule.csv
    python -m jgraph.inspect capture gpt-124m --target h200
    python -m jgraph.inspect capture my_module:my_example --graph full --json report.json

`schedule` does not import jax. `capture` needs jax; with --target it needs no GPU.
"""

from jgraph.cli import command
from jgraph.exits import end_with
from jgraph.inspect._capture import capture
from jgraph.inspect._schedule import schedule

main = command("python -m jgraph.inspect", __doc__, schedule, capture)

if __name__ == "__main__":
    end_with(main)

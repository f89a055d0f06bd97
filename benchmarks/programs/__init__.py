"""jgraph scripts that the benchmarks time."""

"""Training steps of programs from other projects, explained for an H200 and run with `jgraph.jit` on a CPU.

Each program runs in its own Python environment, from the unmodified source of its project.
"""

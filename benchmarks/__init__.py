"""Benchmarks of jgraph against PyTorch and plain JAX. Run `python -m benchmarks list`."""

"""PyTorch and plain JAX scripts that the benchmarks time for comparison."""

"""Reports the time of each kernel of a training step: `python -m jgraph.profile`, or `profile` of a run."""

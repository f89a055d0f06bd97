"""The application: `python -m jgraph.train`, built from the public functions of the library."""

"""Where a training step's time goes: `python -m jgraph.profile`, or `profile` of a run. How: notes/guide/profiles.md."""

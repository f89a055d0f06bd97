"""Where a training step's time goes: `python -m jgraph.profile`, `jgraph.train --profile`. How: notes/guide/profiles.md."""

"""Where a training step's time goes: `python -m jgraph.profile`, `python -m jgraph.train --profile`. How: notes/profile.md."""

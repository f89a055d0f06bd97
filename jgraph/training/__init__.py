"""A training run by configuration: a user of the rooms below."""

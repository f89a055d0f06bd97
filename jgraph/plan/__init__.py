"""Answers before a run: which layouts fit on a number of GPUs, and how fast each may be."""

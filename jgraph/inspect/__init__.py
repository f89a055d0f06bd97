"""Inspects schedules and compiled programs before they run."""

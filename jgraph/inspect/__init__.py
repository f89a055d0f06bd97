"""Looks at schedules and programs before they run."""

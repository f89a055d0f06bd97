"""A module that raises ZeroDivisionError during import, although no package is missing."""

raise ZeroDivisionError("no such luck")

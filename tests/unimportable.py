"""Cannot be imported, and not because something is missing."""

raise ZeroDivisionError("no such luck")

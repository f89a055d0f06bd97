"""Command lines: arguments parsed, results printed, a field of an error turned into its flag."""

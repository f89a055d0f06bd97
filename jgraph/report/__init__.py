"""Compares runs on one HTML page."""

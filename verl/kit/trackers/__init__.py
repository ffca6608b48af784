"""Trackers of other packages, loaded by name."""

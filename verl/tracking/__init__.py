"""Experiment tracking: metrics, transcripts, the live display, timers. Imports no torch."""

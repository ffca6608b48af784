"""Instruments around a run."""

"""Checks of a machine, data, a reward or a plan before a run."""

"""Whole runs that are killed, stopped, starved and damaged: `pytest -m chaos`. cases.py lists what is tried."""

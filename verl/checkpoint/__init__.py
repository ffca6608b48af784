"""Checkpoints and what a run leaves behind when it ends."""

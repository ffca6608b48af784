"""Trackers of other packages: W&B, trackio, MLflow, SwanLab."""

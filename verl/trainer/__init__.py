"""The control layer: one training loop for all algorithms."""

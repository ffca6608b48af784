"""The control layer: one loop for every algorithm."""

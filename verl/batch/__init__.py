"""From scored trajectories to packed batches."""

"""Rules that detect a collapsing run."""

"""A run as one HTML file: curves, rollouts, tokens."""

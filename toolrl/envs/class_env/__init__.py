"""A plain class as an environment."""

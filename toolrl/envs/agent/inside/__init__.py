"""Code that runs in an agent's own environment, with the standard library only."""

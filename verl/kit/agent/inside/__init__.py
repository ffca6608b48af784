"""What runs in an agent's own environment: the standard library only."""

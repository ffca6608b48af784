"""The tokens of some rollouts of every step, kept to be looked at."""

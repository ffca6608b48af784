"""Tokens of some rollouts of every step, for `report` and `explain`."""

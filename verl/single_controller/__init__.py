"""Calling functions on workers. Knows nothing of reinforcement learning."""

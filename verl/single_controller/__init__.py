"""Remote calls on groups of workers. Independent of reinforcement learning."""

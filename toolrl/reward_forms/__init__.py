"""Forms of reward functions of other trainers: TRL, veRL, verifiers."""

"""Episodes: the policy and an environment, turn by turn."""

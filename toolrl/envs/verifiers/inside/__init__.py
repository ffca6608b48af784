"""The program that runs in the environment of verifiers."""

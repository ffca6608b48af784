"""Environments of the package verifiers, which runs in an environment of its own."""

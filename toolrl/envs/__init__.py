"""Environments that are not part of the trainer."""

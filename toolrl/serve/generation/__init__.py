"""Responses without training."""

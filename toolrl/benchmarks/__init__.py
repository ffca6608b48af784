"""Benchmarks of a model, and their runner."""

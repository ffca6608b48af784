"""Judging a model: benchmarks as values, one way to run, count and report them all."""

"""Evaluation: benchmarks as values, with one runner, one record format and one report for all of them."""

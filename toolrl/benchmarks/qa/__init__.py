"""Benchmarks with short answers: math and search questions."""

"""The benchmark protocol, runners, intervals, reports; benchmarks during training."""

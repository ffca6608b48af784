"""toolrl eval: benchmarks before, during and after training."""

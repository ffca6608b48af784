"""toolrl replay: a recorded training step again, bit for bit."""

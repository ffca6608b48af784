"""toolrl preflight: tries all parts of a training on a tiny copy of the model."""

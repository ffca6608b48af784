"""toolrl explain: one sample of a step, from its prompt to its share of the loss."""

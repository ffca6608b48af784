"""A sample from its prompt to its share of the loss."""

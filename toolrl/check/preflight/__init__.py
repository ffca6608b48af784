"""Tokenizer, reward and a step on a tiny copy of the model."""

"""Model folders with their card, GGUF, the hub."""

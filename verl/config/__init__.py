"""The configuration: a tree of frozen dataclasses, and its loader."""

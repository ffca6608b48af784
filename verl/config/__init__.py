"""The configuration: one tree of frozen dataclasses, and the door through which it comes."""

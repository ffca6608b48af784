"""A run that anyone can compute again: its manifest, and the check of its first steps."""

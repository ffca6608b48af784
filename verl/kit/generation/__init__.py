"""Prompts in, responses out, without training; chat in a terminal."""

"""Environments of texts, written for gymnasium, TextArena, SkyRL-gym or rLLM."""

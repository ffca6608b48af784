"""Text environments of gymnasium, TextArena, SkyRL-gym or rLLM."""

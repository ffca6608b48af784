"""Readers of the source datasets of ToolRL's raw file; each yields raw examples, one per decision."""

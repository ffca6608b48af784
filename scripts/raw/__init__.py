"""Readers of the data sets from which ToolRL's raw file was mixed; each yields raw examples, one per decision."""

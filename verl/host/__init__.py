"""Processes, files and signals of this machine."""

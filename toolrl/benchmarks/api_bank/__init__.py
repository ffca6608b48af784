"""API-Bank: benchmark and reward."""

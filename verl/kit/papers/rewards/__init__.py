"""Rewards of other papers."""

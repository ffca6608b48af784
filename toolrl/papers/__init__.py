"""Rewards and text formats of the recipes of other papers."""

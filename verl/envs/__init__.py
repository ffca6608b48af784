"""Environments: they speak messages, and know of no tokens, masks, templates or time limits."""

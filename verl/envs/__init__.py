"""Environments: messages in, messages out; tokens, masks, templates and time limits are handled elsewhere."""

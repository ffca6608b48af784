"""Supervised fine-tuning on demonstrations: a cold start for the policy."""

"""Trains a program of the user's: it calls the policy through OpenAI's or Anthropic's API, with unchanged SDKs."""

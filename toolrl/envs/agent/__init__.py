"""A user's program as the environment, which calls the policy over HTTP with unchanged SDKs."""

"""Tools: a specification with a JSON schema, and an async `call`."""

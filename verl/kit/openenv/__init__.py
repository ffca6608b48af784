"""The OpenEnv protocol: our environments for its clients, and its environments for our policies."""

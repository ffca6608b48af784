"""Customer service over a database: our own tools over the data of tau2-bench (retail and airline)."""

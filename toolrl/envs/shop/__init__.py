"""A simulated shop, the environment of the examples."""

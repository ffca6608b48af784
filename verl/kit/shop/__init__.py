"""A simulated shop: the environment of the examples and of the tests."""

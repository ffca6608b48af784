"""From a configuration to running components: the only modules that name concrete classes."""

"""Keys of veRL and of systems built on it: translated, obsolete, or refused by name; and the names of its metrics."""

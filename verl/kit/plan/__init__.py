"""toolrl plan: memory and time of a training before it starts."""

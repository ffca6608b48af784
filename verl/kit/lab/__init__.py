"""toolrl lab: checks a reward on the rows of a file."""

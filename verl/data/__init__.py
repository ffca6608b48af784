"""From files to tasks: readers, checks, and the shuffled stream the trainer draws from."""

"""The commands as Python functions: `toolrl.train` and the like."""

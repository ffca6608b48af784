"""The generator of composed tasks: tools are drawn anew for every row, so they must be read from the prompt."""

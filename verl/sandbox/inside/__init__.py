"""Code that runs inside the sandbox. Standard library only: the rest of the project is not visible there."""

"""What runs inside the sandbox. Standard library alone, and nothing of the rest of the project: it is not there."""

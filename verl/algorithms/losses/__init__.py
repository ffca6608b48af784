"""Policy and value losses, and the algorithms that they define."""

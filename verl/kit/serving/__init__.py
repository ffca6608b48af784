"""What the HTTP servers of the kit share: token, limits, timeouts."""

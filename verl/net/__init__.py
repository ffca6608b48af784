"""Services of a run: health checks and the token of our own."""

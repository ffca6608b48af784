"""A recorded step again, bit for bit."""

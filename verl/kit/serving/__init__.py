"""What servers and clients of the kit share: token, limits, timeouts; fail-over, health watches, child programs."""

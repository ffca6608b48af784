"""Shared by servers: token, bounds of requests, timeouts; by clients: fail-over, health watches, other interpreters."""

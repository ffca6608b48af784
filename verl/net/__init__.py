"""HTTP: servers with limits, health checks of services."""

"""HTTP between processes: a pool of endpoints, health checks of services."""

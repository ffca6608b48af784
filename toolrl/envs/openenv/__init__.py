"""Any environment on another machine, also for clients of OpenEnv; `env.name=openenv`: a client of its servers."""

"""`env.name=swe`: agents in repositories of `toolrl.swe`."""

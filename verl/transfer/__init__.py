"""How weights travel from trainer ranks to rollout engines: in buckets, over one of several transports."""

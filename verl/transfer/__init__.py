"""Weight sync from trainer ranks to rollout engines: in buckets, over one of several transports."""

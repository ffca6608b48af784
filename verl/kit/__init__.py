"""The kit: tools that look at, plan, check or replay a run, and plug-ins. The path never imports it."""

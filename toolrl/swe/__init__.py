"""Repositories as environments: tasks, runtimes, tools of agents, and verdicts on what they leave."""

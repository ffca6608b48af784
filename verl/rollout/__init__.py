"""Where trajectories come from: engines, episodes, groups."""

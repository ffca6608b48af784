"""The Berkeley Function-Calling Leaderboard: benchmark, reward and multi-turn simulators."""

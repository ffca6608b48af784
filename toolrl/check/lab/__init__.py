"""Gold responses and corrupted ones through a reward; cheats through verdicts."""

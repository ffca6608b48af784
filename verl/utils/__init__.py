"""Small pure helpers; the rewards are in `reward_score`."""

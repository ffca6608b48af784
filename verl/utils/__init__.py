"""Small pure helpers; `reward_score` holds the rewards."""

"""Rewards of single answers: math, GSM8K, and what papers' rewards share."""

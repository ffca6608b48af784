"""Advantage estimators, and the algorithms that they define."""

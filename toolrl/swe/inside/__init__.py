"""Programs for other Pythons: inside a runtime, with the standard library of 3.7 or later; deploy.py: with SWE-ReX."""

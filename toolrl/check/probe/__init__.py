"""Would training learn from these rows?"""

"""Can this machine train?"""

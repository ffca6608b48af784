"""toolrl doctor: can this machine train?"""

"""toolrl probe: would training learn from this data?"""

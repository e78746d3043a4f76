"""Search: which settings give the best merge, by scores on held-out data, and is it one?"""

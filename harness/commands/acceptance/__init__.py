"""The command `acceptance`: how often would this draft be accepted on these texts, for every K?"""

"""Conclusions from runs: the class of statements (`statement`), and functions that derive statements about series of
runs and loads (`series`), about the draft tokens that an engine accepts (`acceptance`), and about answers and texts
(`answers`).
"""

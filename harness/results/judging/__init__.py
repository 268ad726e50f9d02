"""What may be concluded from runs: statements (`statement`), and how they are derived for a series of runs and for
loads (`series`), for what an engine accepts (`acceptance`), and for answers and texts (`answers`).
"""

"""What may be said of several runs: statements (`statement`), of a series and of loads (`series`), and of
what an engine accepts, and why it is little (`acceptance`).
"""

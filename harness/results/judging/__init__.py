"""What may be said of several runs: statements (`statement`), of a series (`series`), of a grid (`grid`), of several K
(`choice`), of computed drafts and predictions (`drafts`, `predictions`), of a figure before and after a change
(`change`), of what an engine accepts and why it is little (`acceptance`), and of texts (`output`).
"""

"""What may be said of several runs: statements (`statement`), of a series (`series`), of a grid (`grid`), of a figure
before and after a change (`change`), of computed speed-ups (`expected`), and of texts (`output`).
"""

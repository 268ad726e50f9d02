"""What may be said of several runs: statements (`statement`), of a series (`series`), of a grid (`grid`)."""

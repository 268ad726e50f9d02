"""The command line: runs, and sweeps whose jobs are processes that may die. Every job leaves a row."""

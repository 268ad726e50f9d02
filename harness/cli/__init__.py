"""The command line: single runs, and sweeps that run each job in a process that may die. Every job leaves a row."""

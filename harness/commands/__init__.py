"""The commands: a folder for each, with its record, rows, measurement, figures, tables and plots."""

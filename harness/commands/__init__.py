"""The commands. The folder of a command contains its record, rows, measurement, figures, tables and plots."""

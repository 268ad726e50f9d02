"""Figures that somebody printed, and whether they are possible. Pure functions of a table's rows."""

"""Intervals, tests and power: how certain a measured number is. Pure functions of counts and times.

A number that cannot be had is nan, never 0. Arguments that make no sense raise ValueError.
"""

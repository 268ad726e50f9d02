"""Runners: transformers models behind `decoding.protocols.Runner`, from plain to compiled and
captured.
"""

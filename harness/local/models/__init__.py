"""Turns settings into models that run: reads configurations and tokenizers, computes sizes, places models on devices,
quantizes and loads them.
"""

"""Turns settings into models that run: configurations, sizes, placement on devices, quantization, loading,
tokenizers.
"""

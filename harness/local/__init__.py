"""The local wing: models that run in this process.

Only this folder imports torch, transformers, accelerate, bitsandbytes or safetensors.
"""

"""The local wing: the code that runs models in this process.

No other folder imports torch, transformers, accelerate, bitsandbytes or safetensors.
"""

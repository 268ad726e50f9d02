"""From settings to models that run: loading, quantization, placement, tokenizers, devices."""

"""Models with a KV cache that can be rolled back, behind `decoding.protocols.Runner`."""

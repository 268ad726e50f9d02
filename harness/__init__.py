"""harness: find out whether speculative decoding pays for a pair of language models, and trust the answer."""

__version__ = "0.1.0"

"""The engines over a loaded pair, `local` and `huggingface`; planning and loading pairs; reading texts with them."""

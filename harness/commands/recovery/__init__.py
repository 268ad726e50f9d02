"""The command `recovery`, which tests whether a pair is lossless."""

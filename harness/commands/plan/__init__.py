"""The command `plan`, which shows whether a pair fits."""

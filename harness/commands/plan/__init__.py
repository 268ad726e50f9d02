"""The command `plan`, which says whether a pair fits."""

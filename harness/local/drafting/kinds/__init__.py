"""One file per kind of draft head: its configuration, its weights, how it drafts and what it
learns.
"""

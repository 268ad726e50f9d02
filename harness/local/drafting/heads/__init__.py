"""Draft heads: how each kind is stored and drafts, and what all have in common."""

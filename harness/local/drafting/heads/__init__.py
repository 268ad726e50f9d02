"""Draft heads: how each kind of head is stored, how it drafts, and what all kinds have in common."""

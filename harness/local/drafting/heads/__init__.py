"""Draft heads: how each kind is stored, how it drafts, and the parts that all kinds share."""

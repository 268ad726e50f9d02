"""Draft heads: their files, features, caches, and how they draft."""

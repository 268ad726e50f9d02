"""One file per way to draft: its settings, its rules and, where it reads nothing but text, all of it."""

"""Training of drafts on what their target says: losses, the loop, and new heads."""

"""Training of drafts on their target's answers: the loop, and its losses."""

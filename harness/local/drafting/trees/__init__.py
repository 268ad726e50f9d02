"""Trees of draft tokens: which are proposed, and how they grow."""

"""Who answers a question: an engine can generate the same texts with and without speculation."""

"""Tables that others printed: their cells, our names of their columns, and their numbers."""

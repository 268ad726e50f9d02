"""The work of every command around its measurement."""

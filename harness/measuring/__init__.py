"""What every command does around its measurement."""

"""The engines of this project, one module each."""

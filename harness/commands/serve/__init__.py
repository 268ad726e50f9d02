"""The command `serve`: the pair as a service over HTTP."""

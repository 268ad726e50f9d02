"""The command `serve`: the pair as a service over HTTP, and a web page."""

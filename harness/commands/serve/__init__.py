"""The pair as a service over HTTP, and a page."""

"""The instrument's requests to models that run in this process, and the values that come back."""

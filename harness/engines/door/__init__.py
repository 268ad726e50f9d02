"""What the instrument asks of models that run in this process, and the values that come back."""

"""From the command line to typed settings: names, validation, and the errors a user reads."""

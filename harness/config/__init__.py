"""From the command line to typed settings: names, checks, and the errors a user reads."""

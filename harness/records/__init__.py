"""What a command is: its record, its experiment, its kinds of row."""

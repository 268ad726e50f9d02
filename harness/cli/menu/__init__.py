"""From what a user types to typed settings: commands, names and help. OmegaConf ends in `conversion.py`."""

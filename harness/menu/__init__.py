"""From what a user types to typed settings: the door where OmegaConf ends."""

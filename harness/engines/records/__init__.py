"""The engines that a user can name, one file each."""

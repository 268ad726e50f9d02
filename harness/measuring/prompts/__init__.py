"""Prompt sets, from files here or on the hub, and their token ids."""

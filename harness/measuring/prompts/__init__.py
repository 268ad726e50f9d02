"""Prompt sets, from files on this machine or on the hub, and the token ids of their prompts."""

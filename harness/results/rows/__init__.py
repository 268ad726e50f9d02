"""Kinds of rows that other commands or rooms read, too."""

"""Kinds of rows that are also read by commands or rooms other than those that write them."""

"""Rows that more commands read than write them."""

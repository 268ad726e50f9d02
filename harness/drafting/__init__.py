"""Drafters: the ways to propose tokens, one per file. Each implements
`decoding.protocols.Drafter`.
"""

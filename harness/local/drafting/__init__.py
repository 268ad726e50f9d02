"""The ways to propose tokens. Each drafter implements `decoding.protocols.Drafter`."""

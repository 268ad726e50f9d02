"""The ways to propose tokens. Each drafter implements `Drafter` or `TensorDrafter` of `decoding.protocols`."""

"""The ways to propose tokens. Each drafter implements `Drafter` or `TensorDrafter` from `decoding.protocols`."""

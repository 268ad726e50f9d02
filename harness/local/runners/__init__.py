"""Runners: transformers models behind `decoding.protocols.Runner`. They hide the difficulties of a KV
cache: padding, positions, masks, several devices, and rows that keep different numbers of tokens.

- `StaticRunner` never moves a slot, because a token's slot is its position. Rolling back costs nothing at any
  context and batch size, and `compile` compiles its passes.
- `SnapshotRunner` can run every model. A roll-back returns to a copy of the state, and tokens that
  were kept since then are read again with the next pass. It is for recurrent models, and for models that make
  their own masks or positions (`runner=eager`).

A pass states where it begins, so that a roll-back needs no call: a verdict only changes the
length in the state. A draft model makes several passes between two verdicts. So a pass that `goes_on` can be taken back
together with the one before it.

Before they decode, runners are compared with plain passes of the model without a cache
(`checks`). The rows are longer than every window, chunk and block in the configuration that the run's rows
exceed. A model that cannot have a runner gets a plainer one, and the user a line with the reason.
"""

"""Runners: they run transformers' models through the interface `decoding.protocols.Runner`.

They hide the difficulties of a KV cache: padding, positions, masks, several devices, and rows that keep different
numbers of tokens.

- `StaticRunner` never moves an entry of the cache, because the slot of a token is its position. So rolling back costs
  nothing, whatever the context and the batch size are. Its passes can be compiled (`compile`).
- `SnapshotRunner` (`runner=eager`) can run every model. It rolls back to a copy of the state; tokens that were kept
  since then are read again in the next pass. It is for recurrent models, and for models that make their own masks or
  positions.

Each pass states where it begins. So rolling back needs no call of its own: a verdict only changes the length in the
state of the rows. A draft model makes several passes between two verdicts. These passes continue each other
(`goes_on`), so that all of them can be rolled back together.

Before runners decode, they are compared with plain passes of the model without a cache (`checks`). If a configuration
states windows, chunks or blocks that are shorter than the run's rows, the compared rows are longer than these. If a
model fails with a runner, it gets a simpler one, and the user sees a line with the reason.
"""

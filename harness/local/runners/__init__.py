"""Runners: transformers models behind `decoding.protocols.Runner`. What they hide is hard about a KV
cache: left padding, positions, masks, several devices, rows that keep different numbers of tokens.

- `StaticRunner` never moves a slot: a token's slot is its position. It costs the same at any
  context and batch, and `compile` compiles its passes.
- `SnapshotRunner` can run every model: a roll-back returns to a copy of the state, and tokens that
  were kept since are read again with the next pass. It is for recurrent models, for those that make
  masks or positions of their own (`runner=eager`).

A pass says where it begins, so that a roll-back is no call of its own: a verdict only changes the
length in the state. A pass that `goes_on` may be taken back with the one before it, because a draft
model makes K of them between two verdicts. Stopwatches time `decide` whole.

Before they decode, runners are compared with plain passes of the model that have no cache
(`checks`), over rows longer than every window, chunk and block of the configuration that the run
exceeds. A model that cannot have a runner gets a plainer one, with a line that says why.
"""

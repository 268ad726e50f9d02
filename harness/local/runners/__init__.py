"""Runners: transformers models behind `decoding.protocols.Runner`, from plain to compiled and
captured. What they hide is hard about a KV cache: left padding, positions, masks, several devices,
rows that keep different numbers of tokens.

- `EagerRunner` is the reference: any transformers model, as it is. Rows are *compact*: a row's
  surviving slots are at the right end of the cache. Masking rejected slots as holes would move
  nothing, but breaks models with sliding windows, whose masks count slots.
- `StaticRunner` never moves a slot: a token's slot is its position. It costs the same at any
  context and batch, and its passes can be compiled and captured, which `PreparedRunner` does.
- `SnapshotRunner` is for models with a recurrent state, which goes back to a copy.

`draw` and `decide` follow from `extend`. They are in the protocol so that `PreparedRunner` can
capture them whole: a verdict alone is 40 small kernels. What it has not prepared it decides as
every runner does. Decisions, rules of acceptance and planted faults compare by value, and
stopwatches time `decide` whole: what is real, what is a control and what is a what-if run the same
prepared code. `keep` counts from the last `keep`, not from the last `extend`, because a drafter
extends K times between two verdicts.

Before they decode, runners are compared with plain passes of the model that have no cache
(`checks`), over rows longer than every window, chunk and block of the configuration that the run
exceeds; `PreparedRunner` in every shape. A model that cannot have a runner gets a plainer one, with
a line that says why.

A short prompt takes a GPU as long as the host needs to launch 1,500 kernels. So `PreparedRunner`
also captures, but does not compile, passes over whole prompts (`prompt_passes`).
"""

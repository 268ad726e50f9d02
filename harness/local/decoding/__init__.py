"""The algorithms: warping, sampling, verification and the decoding loop.

The files here import torch but no model library: a model is known only by the protocol `Runner`. The words follow
Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318):

- target: the model whose output distribution counts.
- drafter: the object that proposes tokens, usually with a small draft model.
- K, num_draft_tokens: the number of tokens proposed in one iteration.
- accepted token: a proposed token that verification kept.
- recovered token: drawn from normalise(max(0, target - draft)) in place of the first rejected one.
- bonus token: drawn from the target after all proposed tokens were accepted.
- iteration: one proposal, one forward pass of the target over K + 1 tokens, and one verdict. In
  regular decoding an iteration is one forward pass, which gives one token.
- warp: temperature, top-k and top-p, which turn logits into probabilities (`warp.py`).
- stream: the random numbers of a row.
- a row that rests: a row that has ended, or that only fills the batch up. It stays in the batch, and
  what is computed for it is ignored.

Letters in shapes: B rows of a batch, V tokens of the vocabulary, K draft tokens, n tokens of one call,
L captured layers, S slots of a cache, D hidden size.
"""

"""The algorithms: warping, sampling, verification and the decoding loop.

The files in this folder import torch, but no library of models: they use models only through the protocol `Runner`.
They use the terms of Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318):

- target: the model from whose distribution the text must be drawn.
- drafter: the object that proposes tokens, usually with a small draft model.
- K, num_draft_tokens: the number of tokens that are proposed in one iteration.
- accepted token: a proposed token that verification kept.
- recovered token: the token that replaces the first rejected one; drawn from normalise(max(0, target - draft)).
- bonus token: the token after a proposal of which all tokens were accepted; drawn from the target.
- iteration: one proposal, one forward pass of the target over K + 1 tokens, and one verdict. In regular decoding, an
  iteration is one forward pass, which yields one token.
- warp: temperature, top-k and top-p, which turn logits into probabilities (`warp.py`).
- stream: the random numbers of a row.
- rest: a row rests if it has ended, or only fills the batch up. It stays in the batch, and everything that is computed
  for it is ignored.

Letters in shapes:

    B    rows of a batch
    V    tokens of the vocabulary
    K    draft tokens
    n    tokens of one call
    L    layers whose hidden states are returned
    S    slots of a cache
    D    hidden size
"""

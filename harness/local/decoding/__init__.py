"""The algorithms: warping, sampling, verification and the decoding loop.

Pure tensors, the protocols defined here, and the loop over a batch (`loop.py`);
no model library is imported. Words, after Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al.
2023 (arXiv:2302.01318):

- target: the model whose output distribution counts.
- drafter: proposes tokens; usually a small draft model.
- K, num_draft_tokens: the tokens proposed in one iteration.
- accepted token: a proposed token that verification kept.
- recovered token: drawn from normalise(max(0, target - draft)) in place of the first rejected one.
- bonus token: drawn from the target after all proposed tokens were accepted.
- iteration: one proposal, one forward pass of the target over K + 1 tokens, one verdict; in
  regular decoding one forward pass and one token.
- stream: the random numbers of a row.

Shapes: B rows of a batch, V vocabulary, K draft tokens, n tokens of one call,
L captured layers, S slots of a cache, D hidden size.
"""

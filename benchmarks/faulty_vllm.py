"""vLLM's server with a fault that changes while it runs.

    FAULT_FILE=fault.txt /opt/vllm/bin/python benchmarks/faulty_vllm.py --model MODEL --port 8000 ...

Arguments are those of vLLM's server. The fault is the content of the file, which is read at each step: a name below,
`none`, which is vLLM with its CPU build's temperatures repaired (vllm-project/vllm #55005), or `as_built`, which is
that build as it is. vLLM's engine runs in a process that imports this file again: everything is planted at import.
benchmarks/RESULTS.md has the commands for the shipped pair. Written for vLLM 0.32.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from vllm.v1.request import Request
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

# " Once more:" in the shipped tokenizer, which the other template puts after each prompt.
FURTHER = (522, 406, 811, 26)

Tensor = torch.Tensor
verify_as_built = rejection_sampler.rejection_sample
recover_as_built = rejection_sampler.sample_recovered_tokens
expand_as_built = rejection_sampler.expand_batch_to_tokens
propose_as_built = SpecDecodeBaseProposer.propose
request_as_built = Request.from_engine_core_request.__func__


def fault() -> str:
    """The fault that is planted now."""
    return Path(os.environ["FAULT_FILE"]).read_text().strip()


def expand(
    of_requests: Tensor, ends: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """A value for each draft token from one for each request: the build's kernel writes to a copy that nobody reads."""
    if fault() == "as_built":
        return expand_as_built(of_requests, ends, num_tokens, replace_from, replace_to)
    replaced = torch.where(of_requests == replace_from, replace_to, of_requests)
    lengths = ends.diff(prepend=ends.new_zeros(1))
    return replaced.to(of_requests.dtype).repeat_interleave(lengths.long())


def recover(
    max_spec_len: int,
    lengths: list[int],
    ends: Tensor,
    drafts: Tensor,
    draft_probabilities: Tensor | None,
    *rest: Any,
) -> Tensor:
    """The token after a rejection for each draft token."""
    if fault() == "residual_of_target":
        draft_probabilities = torch.zeros_like(rest[0])
    return recover_as_built(max_spec_len, lengths, ends, drafts, draft_probabilities, *rest)


def verify(
    drafts: Tensor,
    lengths: list[int],
    max_spec_len: int,
    ends: Tensor,
    draft_probabilities: Tensor | None,
    logits: Tensor,
    bonus: Tensor,
    *rest: Any,
    **further: Any,
) -> Tensor:
    """The tokens [B, K + 1] that are kept of each proposal and follow it; -1 where there are none."""
    planted = fault()
    if planted == "draft_probabilities_ignored":
        draft_probabilities = None
    if planted == "verified_hotter":
        logits = logits / 1.3
    if planted == "verified_greedily":
        best = logits.argmax(-1, keepdim=True)
        logits = torch.full_like(logits, -torch.inf).scatter_(1, best, 0.0)
    if planted == "bonus_of_neighbour":
        bonus = bonus.roll(1, 0).contiguous()
    kept = verify_as_built(
        drafts, lengths, max_spec_len, ends, draft_probabilities, logits, bonus, *rest, **further
    )
    if planted == "rejected_draft_kept":
        for row, proposal in enumerate(drafts.split(lengths)):
            differ = (kept[row, : len(proposal)] != proposal).nonzero()
            if len(differ):
                place = int(differ[0])
                kept[row, place] = proposal[place]
    return kept


def propose(self: Any, *arguments: Any, **named: Any) -> Tensor:
    """A proposal of the draft, whose positions or features are wrong meanwhile."""
    planted = fault()
    if planted == "off_by_one":
        named["target_hidden_states"] = named["target_hidden_states"].roll(1, 0)
    kept: list[tuple[Tensor, Tensor]] = []
    if planted == "shifted":
        # Positions count double. The target may share these tables.
        tables = {
            id(table): table for name, table in self.model.named_buffers() if "cos_sin" in name
        }
        for table in tables.values():
            kept.append((table, table.clone()))
            doubled = table[::2].clone()
            table[: len(doubled)] = doubled
    try:
        return propose_as_built(self, *arguments, **named)
    finally:
        for tensor, before in kept:
            tensor.copy_(before)


def read_request(cls: type[Request], request: Any, *rest: Any) -> Request:
    """A request as the engine reads it."""
    if fault() == "other_template":
        request.prompt_token_ids = [*request.prompt_token_ids, *FURTHER]
    return request_as_built(cls, request, *rest)


rejection_sampler.expand_batch_to_tokens = expand
rejection_sampler.sample_recovered_tokens = recover
rejection_sampler.rejection_sample = verify
SpecDecodeBaseProposer.propose = propose
Request.from_engine_core_request = classmethod(read_request)

if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()

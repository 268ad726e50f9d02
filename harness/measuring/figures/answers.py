"""How much was asked and answered, and how long that took."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.measuring.figures.requests import first_token_times
from harness.results.row import Ratio, pooled
from harness.results.schema import MaybeBool, MaybeFloat, MaybeInt


@dataclass(frozen=True, kw_only=True)
class AnswerFigures(Group):
    """How much was asked and answered, and how long that took."""

    num_prompts: MaybeInt = pooled("mean", "prompts measured; every turn of a conversation is one")
    num_different_prompts: MaybeInt = pooled(
        "mean",
        "different ones among them, where a small set is asked again",
    )
    num_prompts_in_set: MaybeInt = pooled("same", "prompts that the set or file has", in_csv=False)
    draft_remembers: MaybeBool = pooled(
        "same",
        "whether a server drafts from a pool of its own answers, as its command says",
    )
    num_tokens: MaybeInt = pooled("mean", "tokens generated over all prompts", "tokens")
    num_prompt_tokens: MaybeInt = pooled(
        "mean",
        "tokens of all prompts; their bytes over 4 where nobody counts them",
        "tokens",
    )
    shortest_answer: MaybeInt = pooled("smallest", "tokens of the shortest answer", "tokens")
    longest_answer: MaybeInt = pooled("largest", "tokens of the longest answer", "tokens")
    ms_per_token: MaybeFloat = pooled(
        Ratio(over="num_tokens"),
        "time per token of a row, with the prompt's pass: all waits over all tokens",
        "ms",
    )
    ms_per_token_per_answer: MaybeFloat = pooled(
        "mean", "mean over answers of each one's time per token", "ms", in_csv=False
    )
    ms_per_token_std: MaybeFloat = pooled(
        "quadratic mean", "standard deviation of the same, over prompts or batches", "ms"
    )
    tokens_per_second: MaybeFloat = pooled(
        Ratio(of="num_tokens"), "tokens of all rows over total time", "tokens/s"
    )
    tokens_per_second_per_user: MaybeFloat = pooled(
        Ratio(of="num_tokens"),
        "1000 / `ms_per_token`: what a row's reader gets",
        "tokens/s",
        in_csv=False,
    )
    time_to_first_token_ms: MaybeFloat = pooled(
        "mean",
        "mean time to the first token; empty where answers came whole",
        "ms",
    )
    peak_memory_bytes: MaybeInt = pooled(
        "largest", "most GPU memory allocated or held by CUDA graphs, summed over GPUs", "bytes"
    )

    @classmethod
    def measured(cls, run: MeasuredRun, arm: MeasuredArm) -> Group:
        answered = arm.answered
        lengths = [request.num_tokens for request in answered]
        asked = [run.prompt_set.at(request.index) for request in arm.requests]
        # As they were sent, whatever else their rows hold.
        different = {
            str((prompt.chat(), prompt.turns[: prompt.turn], prompt.num_tokens)) for prompt in asked
        }
        num_different = len(different) if len(different) < len(asked) else None
        waits = [wait for generation in arm.generations for wait in generation.waits.values()]
        mean_ms = None
        if waits:
            mean_ms = sum(wait.ms for wait in waits) / sum(wait.num_tokens for wait in waits)
        ms_per_token = [wait.ms / wait.num_tokens for wait in waits]
        first_ms = first_token_times(run, arm)
        peaks = [generation.peak_memory_bytes or 0 for generation in arm.generations]
        return cls(
            num_prompts=len(arm.requests),
            num_different_prompts=num_different,
            num_prompts_in_set=len(run.prompt_set.prompts),
            num_tokens=sum(lengths),
            num_prompt_tokens=sum(request.num_prompt_tokens for request in answered),
            shortest_answer=min(lengths, default=None),
            longest_answer=max(lengths, default=None),
            ms_per_token=mean_ms,
            ms_per_token_per_answer=statistics.fmean(ms_per_token) if ms_per_token else None,
            ms_per_token_std=statistics.stdev(ms_per_token) if len(ms_per_token) > 1 else None,
            tokens_per_second=sum(lengths) / arm.seconds if arm.seconds else None,
            tokens_per_second_per_user=1000 / mean_ms if mean_ms else None,
            time_to_first_token_ms=statistics.fmean(first_ms) if first_ms else None,
            peak_memory_bytes=max(peaks, default=0) or None,
        )

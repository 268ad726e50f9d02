"""The rows of `plan`: one per pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.results.row import figure, setting
from harness.results.schema import MaybeFloat, MaybeInt, MaybeText, RunRow


@dataclass(frozen=True, kw_only=True)
class PlanRow(RunRow):
    """`plan.csv`: one row per pair."""

    kind = "plan"
    recognised_by = ("needed_bytes", "free_bytes", "highest_speedup", "instead")

    temperature: MaybeFloat = setting("temperature; 0 is greedy", "decoding.temperature")
    prompt_length: MaybeInt = setting("tokens of the longest prompt", "prompt_length", "tokens")
    program: MaybeText = figure(
        "whose memory this is: that of harness's own decoding loop, or for a GGUF file a server that reads it"
    )
    num_gpus: MaybeInt = figure("GPUs that were planned for; 0 is main memory")
    free_bytes: MaybeInt = figure(
        "free memory of the GPU that has least; of main memory without a GPU", "bytes"
    )
    reserve_bytes: MaybeInt = figure(
        "kept free on each GPU: `placement.reserve_gb`, or what reading the prompts takes where that is more",
        "bytes",
    )
    num_parameters: MaybeInt = figure("parameters of the target")
    draft_num_parameters: MaybeInt = figure("parameters of the draft")
    draft_dtype: MaybeText = figure("number format of what is not quantized in the draft")
    model_bytes: MaybeInt = figure("weights of the target", "bytes")
    draft_bytes: MaybeInt = figure("weights of the draft", "bytes")
    cache_bytes: MaybeInt = figure("KV cache of the target", "bytes")
    draft_cache_bytes: MaybeInt = figure("KV cache of the draft", "bytes")
    needed_bytes: MaybeInt = figure("weights and caches of both", "bytes")
    most_requests: MaybeInt = figure(
        "requests of `prompt_length` and `max_new_tokens` that a server holds at once beside the weights, on all GPUs"
        " together, with caches at 16 bits"
    )
    regular_most_requests: MaybeInt = figure("the same without the draft")
    request_caches: dict[str, dict[str, int]] | None = figure(
        "KV cache of one such request in a server, by model (`model`, `draft`) and bits (`16`, `8`)",
        "bytes",
    )
    read_bytes: MaybeInt = figure("what one forward pass of the target must read", "bytes")
    speculative_read_bytes: MaybeInt = figure(
        "the same per token with the draft, all tokens accepted", "bytes"
    )
    verification_steps: MaybeFloat = figure(
        "what a verification reads over what a step reads: above 1 where its tokens take different"
        " experts"
    )
    highest_speedup: MaybeFloat = figure(
        "speed-up if every draft token is accepted and verification takes as long as its reading"
    )
    break_even_tokens: MaybeFloat = figure(
        "tokens per iteration from which on speculation pays", "tokens"
    )
    predicted_speedup: MaybeFloat = figure(
        "the same at `acceptance`, in place of all draft tokens; with `3.2@4` or `56%@4` at that K"
    )
    predicted_tokens_per_iteration: MaybeFloat = figure("of that speed-up", "tokens")
    bandwidths: dict[str, float] | None = figure("memory bandwidth by what has it", "GB/s")
    devices_bytes: dict[str, dict[str, int]] | None = figure(
        "free memory and its use by device", "bytes"
    )
    device_map: dict[str, Any] | None = figure("modules of the target to devices")
    instead: list[dict[str, Any]] | None = figure(
        "changes with which the pair would fit: `change` as typed, the models' `size` then, `num_gpus` where there are"
        " fewer"
    )
    note: list[str] | None = figure("what else matters")

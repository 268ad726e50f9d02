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
        "the program whose memory was planned: harness's own decoding loop, or for a GGUF file a server that reads it"
    )
    num_gpus: MaybeInt = figure("number of GPUs that the plan may use; 0 is main memory")
    free_bytes: MaybeInt = figure(
        "free memory of the GPU that has least; without a GPU, free main memory", "bytes"
    )
    reserve_bytes: MaybeInt = figure(
        "kept free on each GPU: `placement.reserve_gb`, or more to read the prompts; for GGUF files 1 GiB by default",
        "bytes",
    )
    num_parameters: MaybeInt = figure("parameters of the target")
    draft_num_parameters: MaybeInt = figure("parameters of the draft")
    draft_dtype: MaybeText = figure("number format of the draft's weights that are not quantized")
    model_bytes: MaybeInt = figure("weights of the target", "bytes")
    draft_bytes: MaybeInt = figure("weights of the draft", "bytes")
    cache_bytes: MaybeInt = figure("KV cache of the target", "bytes")
    draft_cache_bytes: MaybeInt = figure("KV cache of the draft", "bytes")
    needed_bytes: MaybeInt = figure("weights and caches of both", "bytes")
    most_requests: MaybeInt = figure(
        "simultaneous requests with `prompt_length` and `max_new_tokens` whose caches fit next to the weights in a"
        " server, on all GPUs together, with caches at 16 bits"
    )
    regular_most_requests: MaybeInt = figure("`most_requests` without the draft")
    request_caches: dict[str, dict[str, int]] | None = figure(
        "KV cache of a request with `prompt_length` and `max_new_tokens` in a server, by model (`model`, `draft`) and"
        " bits (`16`, `8`)",
        "bytes",
    )
    read_bytes: MaybeInt = figure("bytes that one forward pass of the target must read", "bytes")
    speculative_read_bytes: MaybeInt = figure(
        "bytes that must be read per token with the draft, if all draft tokens are accepted",
        "bytes",
    )
    verification_steps: MaybeFloat = figure(
        "bytes that a verification reads / bytes that a step reads; above 1 if its tokens use different experts"
    )
    highest_speedup: MaybeFloat = figure(
        "speed-up if every draft token is accepted and verification only takes the time for its reading"
    )
    break_even_tokens: MaybeFloat = figure(
        "tokens per iteration above which speculation pays off", "tokens"
    )
    predicted_speedup: MaybeFloat = figure(
        "speed-up as in `highest_speedup`, but with the given `acceptance`; if that names a K (`3.2@4`), at that K"
    )
    predicted_tokens_per_iteration: MaybeFloat = figure(
        "tokens per iteration at the given `acceptance`", "tokens"
    )
    bandwidths: dict[str, float] | None = figure("memory bandwidth, by GPU or memory", "GB/s")
    devices_bytes: dict[str, dict[str, int]] | None = figure(
        "on each device: free memory, and its use by model, draft and cache", "bytes"
    )
    device_map: dict[str, Any] | None = figure("the device of each module of the target")
    instead: list[dict[str, Any]] | None = figure(
        "changes with which the pair would fit: `change` as typed, the models' `size` after it, and `num_gpus` if the"
        " machine has fewer"
    )
    note: list[str] | None = figure("further notes on the plan")

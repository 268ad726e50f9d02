"""Short names of settings, names that other tools give them, and what their values are here."""

from __future__ import annotations

from collections.abc import Mapping

SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("K", "k", "gamma", "num_speculative_tokens"), "num_draft_tokens"),
    **dict.fromkeys(("T", "temp"), "temperature"),
    **dict.fromkeys(("tokens", "max_tokens"), "max_new_tokens"),
    **dict.fromkeys(("n", "limit"), "num_prompts"),
    **dict.fromkeys(("load", "concurrency"), "batch_size"),
    "target": "model",
    "dataset": "prompts",
    "device": "placement",
    "gpu": "gpu_memory",
    "verbose": "details",
}

_SERVER = "a server is measured by its command: harness latency --"
# What to type in place of a value that other tools have.
INSTEAD: Mapping[str, str] = {
    "placement=cuda": "placement=auto uses the GPUs here, placement.gpus=1 one of them",
    "engine=hf": "engine=huggingface is its generate()",
    "engine=vllm": f"{_SERVER} vllm serve ...",
    "engine=sglang": f"{_SERVER} sglang serve ...",
}

"""Short names of settings, and names that other tools give them."""

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
    "verbose": "details",
}

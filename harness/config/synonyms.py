"""Words of other tools, and those that people type first, with ours. Data alone."""

from __future__ import annotations

from collections.abc import Mapping

# Names of settings whose values mean the same: they are taken.
SETTINGS: Mapping[str, str] = {
    **dict.fromkeys(("K", "k", "gamma", "num_speculative_tokens"), "num_draft_tokens"),
    **dict.fromkeys(("num_assistant_tokens", "speculative_num_draft_tokens"), "num_draft_tokens"),
    **dict.fromkeys(("target", "target_model"), "model"),
    **dict.fromkeys(("draft_model", "assistant_model", "speculative_model"), "draft"),
    **dict.fromkeys(("tokens", "num_tokens", "max_tokens"), "max_new_tokens"),
    **dict.fromkeys(("n", "limit", "samples", "num_samples"), "num_prompts"),
    **dict.fromkeys(("T", "temp"), "temperature"),
    **dict.fromkeys(("batch", "bs", "load"), "batch_size"),
    "dataset": "prompts",
    "device": "placement",
}

# Names of settings and of their values, in lower case, in place of which something else has to be typed: it is
# suggested.
NAMES: Mapping[str, str] = {
    **dict.fromkeys(("output", "output_file", "out", "csv"), "results.file"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "model.quantization"),
    **dict.fromkeys(("fp16", "half"), "float16"),
    "bf16": "bfloat16",
    "fp32": "float32",
    "int8": "8bit",
    **dict.fromkeys(("int4", "nf4"), "4bit"),
    **dict.fromkeys(("hf", "transformers"), "huggingface"),
    **dict.fromkeys(("llama.cpp", "openai", "sglang", "tgi"), "server"),
    **dict.fromkeys(("ngram", "prompt_lookup"), "lookup"),
    **dict.fromkeys(("cuda", "gpu"), "auto"),
    "8b": "llama3.1_8B",
    "70b": "llama3.1_70B",
}

# First words that are no command, and the line to type in their place.
COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("bench", "benchmark", "measure", "run", "speed"), "harness latency"),
    "sweep": "harness latency -m K=2,4,8",
    "race": "harness compare",
    **dict.fromkeys(("lossless", "verify"), "harness recovery"),
    **dict.fromkeys(("accuracy", "evaluate"), "harness eval"),
    **dict.fromkeys(("fit", "memory"), "harness plan"),
    **dict.fromkeys(("server", "api"), "harness serve"),
    "results": "harness report",
    "diff": "harness regress",
    **dict.fromkeys(("models", "presets", "drafts", "engines"), "harness help presets"),
    "settings": "harness help all",
    "columns": "python -m harness.cli.menu.columns",
}

# Words after a command that are no setting, as patterns, and what to type in their place.
PHRASES: Mapping[str, str] = {
    r"(\d+)x(\d+[mgt]i?b)": r"gpus=\1 gpu_memory=\2",
    r"(\d+[mgt]i?b)": r"gpu_memory=\1",
    r"(?:server|base_url)=(.+)": r"engine=server url=\1",
    r"(https?://.+)": r"engine=server url=\1",
}

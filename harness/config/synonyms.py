"""Words of other tools, and those that people type first, with ours. Data alone."""

from __future__ import annotations

from collections.abc import Mapping

# Names of settings whose values mean the same: they are taken.
SETTINGS: Mapping[str, str] = {
    **dict.fromkeys(("K", "k", "gamma", "num_speculative_tokens"), "num_draft_tokens"),
    **dict.fromkeys(("num_assistant_tokens", "speculative_num_draft_tokens"), "num_draft_tokens"),
    **dict.fromkeys(("draft_tokens", "draft_length", "spec_tokens"), "num_draft_tokens"),
    **dict.fromkeys(("target", "target_model", "models"), "model"),
    **dict.fromkeys(("draft_model", "assistant_model", "speculative_model", "drafts"), "draft"),
    **dict.fromkeys(("tokens", "num_tokens", "max_tokens"), "max_new_tokens"),
    **dict.fromkeys(("n", "limit", "samples", "num_samples"), "num_prompts"),
    **dict.fromkeys(("T", "temp"), "temperature"),
    **dict.fromkeys(("batch", "bs", "load", "concurrency", "max_concurrency"), "batch_size"),
    **dict.fromkeys(("dataset", "data", "input", "prompt_file", "prompts_file"), "prompts"),
    **dict.fromkeys(("verbose", "v"), "details"),
    "quick": "test",
    "memory": "gpu_memory",
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
    **dict.fromkeys(("openai", "tgi"), "server"),
    **dict.fromkeys(("ngram", "prompt_lookup"), "lookup"),
    **dict.fromkeys(("cuda", "gpu"), "auto"),
    "8b": "llama3.1_8B",
    "70b": "llama3.1_70B",
}

# Values of `engine=` that are servers, and the commands that are typed behind `--` in their place.
SERVERS: Mapping[str, str] = {
    "vllm": "vllm serve MODEL --speculative-config ...",
    "sglang": "sglang serve --model-path MODEL --speculative-algorithm ...",
    "llama.cpp": "llama-server -m MODEL.gguf --spec-type ...",
    "llama-server": "llama-server -m MODEL.gguf --spec-type ...",
}

# First words that are no command, and the line to type in their place.
COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("bench", "benchmark", "measure", "run", "speed"), "harness latency"),
    **dict.fromkeys(("sweep", "tune", "best-k", "best_k"), "harness latency -m K=2,4,8"),
    "rank": "harness latency -m draft=tiny_draft,lookup,suffix",
    "test": "harness latency test=true",
    **dict.fromkeys(("race", "chat", "demo"), "harness compare"),
    **dict.fromkeys(("lossless", "verify", "check", "prove"), "harness recovery"),
    **dict.fromkeys(("accuracy", "evaluate", "quality"), "harness eval"),
    **dict.fromkeys(("fit", "memory"), "harness plan"),
    **dict.fromkeys(("server", "api"), "harness serve"),
    **dict.fromkeys(("results", "show", "html", "page"), "harness report"),
    **dict.fromkeys(("plot", "picture", "chart", "slide"), "harness report format=svg"),
    "diff": "harness regress",
    **dict.fromkeys(("models", "presets", "drafts", "engines", "list"), "harness help presets"),
    "settings": "harness help all",
    "columns": "python -m harness.cli.menu.columns",
}

# Words after a command, as patterns, and what to type in their place.
PHRASES: Mapping[str, str] = {
    r"(?:gpus=)?(\d+)x(?:[a-z]+\d+-)?(\d+[mgt]i?b)": r"gpus=\1 gpu_memory=\2",
    r"(\d+[mgt]i?b)": r"gpu_memory=\1",
    r"(?:server|base_url)=(.+)": r"url=\1",
    r"port=(\d+)": r"url=http://127.0.0.1:\1/v1",
    r"(https?://.+)": r"url=\1",
    r"greedy=true": "temperature=0",
    r"K=(?:best|optimal|sweep)": "-m K=2,4,8",
    r"(gsm8k|lm_eval:.+)": r"task=\1",
    r"([^=]+\.(?:jsonl?|txt|parquet))": r"prompts=\1",
    r"([^=]+\.gguf|[~\w.-]*(?:/[\w.-]+)+/?)": r"model=\1",
}

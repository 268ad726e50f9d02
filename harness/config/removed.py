"""The replacements for commands, settings and values that earlier versions had."""

from __future__ import annotations

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "by_kind": "harness latency measures requests of one kind: engine.extra={...}",
    "decoding.rule=typical": "a lossy rule of your own is decoding.rule=./file.py:Name",
    "draft.threshold": "the server that runs the head has it: harness latency -- COMMAND",
    "threshold": "the server that runs the head has it: harness latency -- COMMAND",
    "fault": "decoding.rule=./file.py:Name plants a mistake: docs/losslessness.md",
    "max_logprobs": "vLLM and llama.cpp return log-probabilities",
    "costs": "harness latency -m K=2,4,8 measures what was predicted from costs",
    "map": "harness latency -m batch_size=1,4,16 K=2,4 ends with a schedule",
    "placement.device_map": "placement.strategy=balanced and model.gpus= divide a model",
    "engine.rate": "AIPerf sends requests at a rate; batch_size= keeps requests in flight",
    "regress": "harness latency -- OLD_COMMAND -- NEW_COMMAND measures two versions in turns",
}

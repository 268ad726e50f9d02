"""Result files of benchmarks of servers, by their keys."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_SUCCESSFUL = "successful.mean"
_OF_VLLM = "total_token_throughput"


class _Tool(NamedTuple):
    """A benchmark.

    Attributes:
        mark: a key that only its files have, or only those of none above it; `a.b` is b in a.
        keys: where our figures stand, by our name.
    """

    name: str
    mark: str
    keys: Mapping[str, str]


# Both are descendants of one script.
_SERVED = {
    "batch_size": "max_concurrency",
    "tokens_per_second": "output_throughput",
    "ms_per_token": "mean_tpot_ms",
}
_TOOLS = (
    _Tool(
        "SGLang's bench_serving",
        "total_output_tokens_retokenized",
        {**_SERVED, "tokens_per_iteration": "accept_length"},
    ),
    _Tool(
        "vllm bench serve",
        _OF_VLLM,
        {
            **_SERVED,
            "tokens_per_iteration": "spec_decode_acceptance_length",
            "acceptance_rate": "spec_decode_acceptance_rate",
            "num_drafted": "spec_decode_draft_tokens",
            "num_drafts": "spec_decode_num_drafts",
        },
    ),
    _Tool(
        "AIPerf",
        "aiperf_version",
        {
            "batch_size": "input_config.loadgen.concurrency",
            "tokens_per_second": "output_token_throughput.avg",
            "ms_per_token": "inter_token_latency.avg",
            "tokens_per_iteration": "spec_decode_acceptance_length.avg",
            "acceptance_rate": "spec_decode_draft_acceptance_rate.avg",
        },
    ),
    _Tool(
        "guidellm",
        "metrics.output_tokens_per_second",
        {
            "tokens_per_second": f"metrics.output_tokens_per_second.{_SUCCESSFUL}",
            "ms_per_token": f"metrics.inter_token_latency_ms.{_SUCCESSFUL}",
        },
    ),
)


def rows_of_results(text: str) -> tuple[str, list[dict[str, str]]] | None:
    """The tool that wrote a JSON text, or lines of it, and the figures of each of its runs; None for any other."""
    content: Any = _content(text)
    if len(content) == 1 and isinstance(content[0], dict):
        content = content[0].get("benchmarks", content)
    for tool in _TOOLS:
        if (
            isinstance(content, list)
            and content
            and all(_at(run, tool.mark) is not None for run in content)
        ):
            return tool.name, [_row(tool, run) for run in content]
    return None


def _content(text: str) -> list[Any]:
    """One value, or one a line; none where it is no JSON."""
    for parts in ([text], text.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            return [json.loads(part) for part in parts if part.strip()]
    return []


def _row(tool: _Tool, run: Mapping[str, Any]) -> dict[str, str]:
    values = {name: _at(run, key) for name, key in tool.keys.items()}
    numbers = {
        name: value for name, value in values.items() if isinstance(value, int | float) and value
    }
    num_drafted, drafts = (numbers.pop(name, 0) for name in ("num_drafted", "num_drafts"))
    if drafts and num_drafted % drafts:
        numbers["mean_num_draft_tokens"] = num_drafted / drafts
    elif drafts:
        numbers["num_draft_tokens"] = num_drafted // drafts
    cells = {
        name: str(value) if isinstance(value, int) else f"{value:#.5g}"
        for name, value in numbers.items()
    }
    if tool.mark == _OF_VLLM and "acceptance_rate" in cells:
        cells["acceptance_rate"] += " %"
    return cells


def _at(content: Any, key: str) -> Any:
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content

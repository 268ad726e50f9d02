"""From a text to tables of cells by heading: Markdown, separated columns, and result files of benchmarks of servers."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Cells = Mapping[str, str]


# Both are descendants of one script.
_SERVED = {
    "batch_size": "max_concurrency",
    "tokens_per_second": "output_throughput",
    "ms_per_token": "mean_tpot_ms",
}
_DRAFTED, _NUM_DRAFTS = "spec_decode_draft_tokens", "spec_decode_num_drafts"
_FIXED_K, _MEAN_DRAFTED = "draft tokens / drafts", "mean draft tokens / drafts"
# In percent.
_VLLM_RATE = "spec_decode_acceptance_rate"
# By a key that only a benchmark's files have, or only those of none above it, where our figures stand, by our name;
# `a.b` is b in a.
_TOOLS: Mapping[str, Mapping[str, str]] = {
    # SGLang's bench_serving.
    "total_output_tokens_retokenized": {**_SERVED, "tokens_per_iteration": "accept_length"},
    # vllm bench serve.
    "total_token_throughput": {
        **_SERVED,
        "tokens_per_iteration": "spec_decode_acceptance_length",
        "acceptance_rate": _VLLM_RATE,
    },
    # AIPerf.
    "aiperf_version": {
        "batch_size": "input_config.loadgen.concurrency",
        "tokens_per_second": "output_token_throughput.avg",
        "ms_per_token": "inter_token_latency.avg",
        "tokens_per_iteration": "spec_decode_acceptance_length.avg",
        "acceptance_rate": "spec_decode_draft_acceptance_rate.avg",
    },
    # guidellm.
    "metrics.output_tokens_per_second": {
        "tokens_per_second": "metrics.output_tokens_per_second.successful.mean",
        "ms_per_token": "metrics.inter_token_latency_ms.successful.mean",
    },
}

# Our names of columns of result files.
KEYS = {key: name for keys in _TOOLS.values() for name, key in keys.items()}
KEYS |= {_FIXED_K: "num_draft_tokens", _MEAN_DRAFTED: "mean_num_draft_tokens"}


def tables_of(text: str) -> list[Sequence[Cells]]:
    """The rows by heading of each table of a text, or the runs of a result file as those of one."""
    runs = _json_values(text)
    if len(runs) == 1:
        (runs,) = runs
    if isinstance(runs, dict):
        runs = runs.get("benchmarks", [runs])
    for mark, keys in _TOOLS.items():
        if isinstance(runs, list) and runs and all(_at(run, mark) is not None for run in runs):
            rows = [_cells_of_run([*keys.values()], run) for run in runs]
            headings = dict.fromkeys(heading for row in rows for heading in row)
            return [[dict.fromkeys(headings, "") | row for row in rows]]
    tables = [*_markdown_tables(text)]
    return tables or [*_table_by_lines(text)]


def _json_values(text: str) -> list[Any]:
    """One value, or one a line; none where it is no JSON."""
    for parts in ([text], text.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            return [json.loads(part) for part in parts if part.strip()]
    return []


def _cells_of_run(keys: Sequence[str], run: Any) -> dict[str, str]:
    values = {key: _at(run, key) for key in (*keys, _DRAFTED, _NUM_DRAFTS)}
    numbers = {
        key: value for key, value in values.items() if isinstance(value, int | float) and value
    }
    drafted, drafts = (numbers.pop(key, 0) for key in (_DRAFTED, _NUM_DRAFTS))
    if drafts and drafted % drafts:
        numbers[_MEAN_DRAFTED] = drafted / drafts
    elif drafts:
        numbers[_FIXED_K] = drafted // drafts
    return {
        key: f"{number:#.5g}{' %' if key == _VLLM_RATE else ''}" for key, number in numbers.items()
    }


def _at(content: Any, key: str) -> Any:
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _markdown_tables(text: str) -> Iterator[Sequence[Cells]]:
    for has_cells, lines in itertools.groupby(text.splitlines(), lambda line: "|" in line):
        if has_cells:
            rows = [re.split(r"(?<!\\)\|", _bare(line)) for line in lines]
            if len(rows) > 2 and all(re.fullmatch(r"\s*:?-+:?\s*", cell) for cell in rows[1]):
                yield _by_heading([rows[0], *rows[2:]])


def _bare(line: str) -> str:
    """A line of a table without its outer bars, tags, marks, and those of a quotation."""
    words = re.sub(r"^[\s>]+|</?[a-zA-Z][^>]*>|\*\*|`", "", line)
    return words.strip().removeprefix("|").removesuffix("|")


def _table_by_lines(text: str) -> Iterator[Sequence[Cells]]:
    """A table whose columns are apart by a sign, or by spaces, in every line."""
    lines = [line for line in text.splitlines() if line.strip(" -=+\t|:")]
    # A comment above the heading.
    while len(lines) > 1 and lines[0][0] == "#" and lines[0].count(",") != lines[-1].count(","):
        del lines[0]
    for delimiter in ("\t", ";", ",", "|", None):
        rows: list[list[str]] = []
        if delimiter is None:
            rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
        else:
            with contextlib.suppress(csv.Error):
                rows = [*csv.reader(lines, delimiter=delimiter)]
        widths = {len(row) for row in rows}
        # Two cells apart by spaces have the lines of a summary.
        if len(rows) > 1 and len(widths) == 1 and min(widths) >= (2 if delimiter else 3):
            yield _by_heading(rows)
            return


def _by_heading(rows: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    headings: list[str] = []
    for heading in map(str.strip, rows[0]):
        is_new = not heading or heading not in headings
        headings.append(heading if is_new else f"{heading} ({len(headings) + 1})")
    padding = [""] * len(headings)
    return [dict(zip(headings, map(str.strip, [*row, *padding]), strict=False)) for row in rows[1:]]

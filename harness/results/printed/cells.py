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
# Stands between a heading that comes again and the number of its column.
AGAIN = " [column"

# Where result files have our figures, by a heading: vllm bench serve and SGLang's bench_serving, AIPerf, guidellm.
# `a.b` is b in a, and `a/b` their ratio.
_PLACES = {
    "model": "model_id input_config.endpoint.model_names",
    "prompts": "dataset_name input_config.input.public_dataset",
    "in flight": "max_concurrency input_config.loadgen.concurrency",
    "tok/s": "output_throughput output_token_throughput.avg metrics.output_tokens_per_second.successful.mean",
    "ms/token": "mean_tpot_ms inter_token_latency.avg metrics.inter_token_latency_ms.successful.mean",
    "tokens/iteration": "accept_length spec_decode_acceptance_length spec_decode_acceptance_length.avg",
    "acceptance rate %": "spec_decode_acceptance_rate",
    "acceptance rate": "spec_decode_draft_acceptance_rate.avg",
    "K": "spec_decode_draft_tokens/spec_decode_num_drafts",
    "input tokens": "total_input_tokens/completed input_sequence_length.avg"
    " metrics.prompt_token_count.successful.mean",
    "output tokens": "total_output_tokens/completed output_sequence_length.avg"
    " metrics.output_token_count.successful.mean",
}


def tables_of(text: str, regular: str = "") -> list[Sequence[Cells]]:
    """The rows by heading of each table of a text, or the runs of a result file as those of one.

    Args:
        regular: a result file of runs without drafts, whose rows follow.
    """
    runs, regular_runs = _runs_of(text), _runs_of(regular)
    if runs or regular:
        rows = [*runs, *regular_runs]
        # Of several runs those without drafts are the regular arm.
        without = [run for run in rows if "tokens/iteration" not in run]
        for run in regular_runs if without == rows else without:
            run["K"] = "0"
        headings = dict.fromkeys(itertools.chain(*rows), "")
        return [[headings | run for run in rows]] if runs else []
    return [*_markdown_tables(text)] or [*_table_by_lines(text)]


def _runs_of(text: str) -> list[dict[str, str]]:
    """The runs of a result file; none of another text."""
    runs = _json_values(text)
    if len(runs) == 1:
        content = _at(runs[0], "benchmarks") or runs[0]
        runs = content if isinstance(content, list) else runs
    rows = [_cells_of_run(run) for run in runs]
    return rows if all({"tok/s", "ms/token"} & row.keys() for row in rows) else []


def _json_values(text: str) -> list[Any]:
    """One value, or one a line; none where it is no JSON."""
    for parts in ([text], text.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            return [json.loads(part) for part in parts if part.strip()]
    return []


def _cells_of_run(run: Any) -> dict[str, str]:
    cells = {}
    for heading, keys in _PLACES.items():
        for key in keys.split():
            value, *below = (_at(run, part) for part in key.split("/"))
            if isinstance(value, str | list):
                cells[heading] = str(value).strip("[]'")
            elif all(isinstance(number, int | float) and number for number in (value, *below)):
                number = value / below[0] if below else value
                # Drafts whose number varies have no K.
                if heading != "K" or number % 1 == 0:
                    is_count = heading in ("K", "in flight")
                    cells[heading] = f"{number:g}" if is_count else f"{number:#.5g}"
    return cells


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
    """A table whose columns are apart by a sign, or by spaces, in every line but comments."""
    lines = [re.sub(r"\s+(<-|←).*", "", line) for line in text.splitlines()]
    lines = [line for line in lines if not re.match(r"[-\s=+|:]*$|#(?![,;|\t])", line)]
    for delimiter in ("\t", ";", ",", "|", None):
        rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
        if delimiter:
            with contextlib.suppress(csv.Error):
                rows = [*csv.reader(lines, delimiter=delimiter, skipinitialspace=True)]
        widths = {len(row) for row in rows}
        # Two cells apart by spaces have the lines of a summary.
        if len(rows) > 1 and len(widths) == 1 and min(widths) >= (2 if delimiter else 3):
            yield _by_heading(rows)
            return


def _by_heading(rows: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """The rows by heading; a heading that comes again gets the number of its column."""
    headings: list[str] = []
    for place, text in enumerate(map(str.strip, rows[0]), start=1):
        headings.append(f"{text}{AGAIN} {place}]" if text in headings else text)
    padding = [""] * len(headings)
    return [dict(zip(headings, map(str.strip, [*row, *padding]), strict=False)) for row in rows[1:]]

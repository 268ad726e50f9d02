"""The results of `gpu_suite.py`: which targets are reached, and every table, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attention
import common
import growth
from gpu_pairs import table as pair_table

from harness.report.pages import markdown
from harness.report.table import Line, Table

# By case; the others are pairs.
TABLES: dict[str, Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], Table]] = {
    "attention": attention.table,
    "growth": lambda about, lines: growth.table(
        f"cost over the bare forward passes on {about['devices']}, {about['layers']} layers × {about['hidden_size']}",
        lines,
    ),
    "tests": lambda about, lines: common.table(
        "pytest -m gpu",
        ["", ""],
        [("summary", about["summary"]), *(("failed", line["test"]) for line in lines)],
        texts=2,
    ),
}
# On a GPU, and without one.
MAIN_PAIRS = ("7B+llama_68m-batch1-k4", "tiny+tiny_draft-batch1-k4-runners")


@dataclass(frozen=True)
class Result:
    """A case that has run: the line about it, and the others."""

    about: dict[str, Any]
    lines: list[dict[str, Any]]


def read(directory: Path, names: Iterable[str]) -> dict[str, Result]:
    """The results in a directory, by case."""
    found = {}
    for name in names:
        if (file := directory / f"{name}.jsonl").exists():
            about, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
            found[name] = Result(about, lines)
    return found


def report(results: Mapping[str, Result]) -> str:
    """One block for RESULTS.md."""
    if not results:
        return "no results"
    about = next(iter(results.values())).about
    title = f"{about['devices']}, {about['timestamp'][:10]}"
    versions = ", ".join(
        f"{name} {about[f'{name}_version']}" for name in ("torch", "transformers", "bitsandbytes")
    )
    minutes = sum(result.about.get("seconds", 0) for result in results.values()) / 60
    said = f"python benchmarks/gpu_suite.py: {minutes:.0f} minutes, commit {(about['commit'] or '')[:10]}, {versions}."
    parts: list[Table | Line] = [Line(said), targets(results)]
    for name, result in results.items():
        if "error" in result.about:
            parts.append(Line(f"{name} failed: {result.about['error']}", "warning"))
        else:
            parts.append(TABLES.get(name, pair_table)(result.about, result.lines))
    # A section of a page that has its own title.
    return "\n".join(
        f"#{line}" if line.startswith("#") else line
        for line in markdown(title, [], parts).splitlines()
    )


def targets(results: Mapping[str, Result]) -> Table:
    """What was asked for, what was found, and whether that is enough."""
    name = next((one for one in MAIN_PAIRS if one in results), MAIN_PAIRS[0])
    rows = (
        [*_of_pair(name, results[name])]
        if name in results and results[name].lines
        else [(name, "not measured", "")]
    )
    if "tests" in results and "exit_code" in results["tests"].about:
        about = results["tests"].about
        green = about["exit_code"] == 0 and "passed" in about["summary"]  # not skipped altogether
        rows.append(("pytest -m gpu is green", about["summary"], _reached(green)))
    else:
        rows.append(("pytest -m gpu is green", "not run", ""))
    return common.table("targets", ["target", "found", ""], rows, texts=3)


def _of_pair(name: str, result: Result) -> Iterable[tuple[str, str, str]]:
    lines = {line["arm"]: line for line in result.lines}
    ours = [line for line in lines.values() if line.get("step_ms")]
    regular, speculative = (
        min(
            (line for line in ours if line["arm"].endswith(arm)),
            key=lambda line: line["ms_per_token"],
        )
        for arm in (" regular", " speculative")
    )
    if floor := result.about["floor_ms"]:
        times = regular["step_ms"] / floor
        found = f"{times:.2f}× ({regular['arm']}: {regular['step_ms']:.2f} ms over {floor:.2f} ms)"
        yield f"{name}: a step at most 1.2× the bandwidth floor", found, _reached(times <= 1.2)
    assisted = [line for arm, line in lines.items() if arm.startswith("assisted")]
    if assisted:
        best = min(assisted, key=lambda line: line["ms_per_token"])
        ratio = common.ratio(best["seconds"], speculative["seconds"])
        arms = f"{speculative['arm']} over {best['arm']}"
        found = (
            f"{ratio.estimate:.2f}× ({'; '.join(filter(None, (common.interval(ratio, 2), arms)))})"
        )
        yield (
            f"{name}: speculative at least 2× assisted generation",
            found,
            _reached(ratio.estimate >= 2),
        )
    found = f"{speculative['reached']:.0%} of {speculative['predicted_speedup']:.2f}× ({speculative['arm']})"
    yield (
        f"{name}: measured at least 95 % of predicted",
        found,
        _reached(speculative["reached"] >= 0.95),
    )


def _reached(holds: bool) -> str:
    return "reached" if holds else "missed"

"""Reports the results of `gpu_suite.py` as Markdown: what targets are reached, and all tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from gpu_pairs import table as pair_table

from harness.reporting.files import ReportContents, markdown
from harness.reporting.table import Table


def _tests_table(about: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Table:
    failed = [("failed", line["test"]) for line in lines if line["outcome"] == "failed"]
    rows = [("summary", about["summary"]), *failed]
    return common.table("tests that need a GPU", ["", ""], rows, texts=2)


def _commands_table(about: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (line["command"], str(line["exit_code"]), f"{line['seconds']:.0f}", *line["fallbacks"][:1])
        for line in lines
    ]
    rows = [row if len(row) == 4 else (*row, "") for row in rows]
    headings = ["command", "exit code", "seconds", "fallback"]
    return common.table("the command line", headings, rows, texts=4)


# The function that makes the table of a case. Cases that are not listed are pairs.
TABLES: dict[str, Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], Table]] = {
    "tests": _tests_table,
    **dict.fromkeys(("recovery", "eagle3", "sharded"), _commands_table),
}
# The main pair on a GPU, and without a GPU.
MAIN_PAIRS = ("7B+llama_68m-batch1-k4", "tiny+tiny_draft-batch1-k4")
# Our implementation is worth its code if the other way takes more than this many times as long.
_WORTH = 1.05
README_MARKS = "<!-- GPU results begin -->\n", "<!-- GPU results end -->\n"


@dataclass(frozen=True)
class Result:
    """The result of a case: the line about the case, and the other lines."""

    about: dict[str, Any]
    lines: list[dict[str, Any]]


def read(directory: Path, names: Iterable[str]) -> dict[str, Result]:
    """Return the results in a directory by case, in the order of `names`. Cases without a result are left out."""
    results = {name: read_file(directory / f"{name}.jsonl") for name in names}
    return {name: result for name, result in results.items() if result is not None}


def read_file(file: Path) -> Result | None:
    """Return the result of one case; None if the file does not exist."""
    if not file.exists():
        return None
    about, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return Result(about, lines)


def with_peers(name: str, results: Mapping[str, Result]) -> Result:
    """Return a pair's result with the arms of its peers, which were measured in separate processes."""
    result = results[name]
    eager = next((line for line in result.lines if line["arm"] == "eager regular"), None)
    lines = list(result.lines)
    for other, peer in results.items():
        if eager is None or not other.startswith(f"{name}-"):
            continue
        for line in peer.lines:
            count = min(len(line["seconds"]), len(eager["seconds"]))
            ratio = common.ratio(eager["seconds"][:count], line["seconds"][:count])
            lines.append(line | {"faster_by": common.bounds(ratio)})
    return Result(result.about, lines)


def fill(page: Path, results: Mapping[str, Result]) -> None:
    """Write the table of targets and the main pair's table between the marks in a Markdown file."""
    begin, end = README_MARKS
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    name = next((one for one in MAIN_PAIRS if one in results), None)
    tables = [targets(results)]
    if name is not None and results[name].lines:
        result = with_peers(name, results)
        tables.append(pair_table(result.about, result.lines))
    filled = _markdown("", tables).strip().removeprefix("#").strip()
    page.write_text(f"{before}{begin}\n{filled}\n\n{end}{after}", encoding="utf-8")


def report(results: Mapping[str, Result]) -> str:
    """Return a section for RESULTS.md with all results."""
    if not results:
        return "no results"
    about = next(iter(results.values())).about
    title = f"{about['devices']}, {about['timestamp'][:10]}"
    versions = ", ".join(
        f"{name} {about[f'{name}_version']}" for name in ("torch", "transformers", "bitsandbytes")
    )
    minutes = sum(result.about.get("seconds", 0) for result in results.values()) / 60
    said = f"python benchmarks/gpu_suite.py: {minutes:.0f} minutes, commit {(about['commit'] or '')[:10]}, {versions}."
    tables = [targets(results), decisions(results)]
    notes: list[str] = []
    for name, result in results.items():
        if "error" in result.about:
            notes.append(f"{name} failed: {result.about['error']}")
        if not result.about["done"]:
            notes.append(f"{name} was cut off; its figures are of what was done")
        if name in MAIN_PAIRS:
            result = with_peers(name, results)
        if result.lines:
            tables.append(TABLES.get(name, pair_table)(result.about, result.lines))
    # Lower all headings by a level, because RESULTS.md has its own title.
    return "\n".join(
        f"#{line}" if line.startswith("#") else line
        for line in _markdown(title, tables, about=said, notes=notes).splitlines()
    )


def _markdown(
    title: str, tables: Sequence[Table], about: str = "", notes: Sequence[str] = ()
) -> str:
    page = ReportContents(title, about=[about], pages={}, sources=tables, notes=notes)
    return markdown(page, note="")


def targets(results: Mapping[str, Result]) -> Table:
    """A table of the targets, the figures, and whether each target is reached."""
    name = next((one for one in MAIN_PAIRS if one in results), MAIN_PAIRS[0])
    rows = (
        [*_of_pair(name, with_peers(name, results))]
        if name in results and results[name].lines
        else [(name, "not measured", "")]
    )
    if "tests" in results and "exit_code" in results["tests"].about:
        about = results["tests"].about
        # If all tests were skipped, the target is missed.
        green = about["exit_code"] == 0 and not about["summary"].startswith("0 passed")
        rows.append(("pytest -m gpu is green", about["summary"], _reached(green)))
    else:
        rows.append(("pytest -m gpu is green", "not run", ""))
    return common.table("targets", ["target", "found", ""], rows, texts=3)


def decisions(results: Mapping[str, Result]) -> Table:
    """A table of decisions that follow from the results, such as whether our implementation is worth its code."""
    rows = []
    name = next((one for one in MAIN_PAIRS if one in results), None)
    if name is not None:
        lines = {line["arm"]: line for line in with_peers(name, results).lines}
        rows = [*_worth(lines)]
    for case, question, sign in (
        ("recovery", "what is timed", "loss"),
        ("eagle3", "an EAGLE-3 head", "ms/token"),
        ("sharded", "a target over two GPUs", "ms/token"),
    ):
        if case in results:
            for line in results[case].lines:
                rows.append((question, _answer(line, sign), line["command"]))
    return common.table("decisions", ["question", "found", "so"], rows, texts=3)


def _worth(lines: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[str, str, str]]:
    """Ratios of the main pair's times, the other way over ours: as question, ratio and decision."""
    for question, ours, theirs, so in (
        (
            "our compiled passes against generate with a compiled static cache, without a draft",
            "compiled regular",
            "generate, static compiled cache",
            ("ours goes", "ours stays"),
        ),
        ("compiled passes against eager", "compiled regular", "eager regular", ("", "")),
    ):
        if ours not in lines or theirs not in lines:
            continue
        count = min(len(lines[ours]["seconds"]), len(lines[theirs]["seconds"]))
        ratio = common.ratio(lines[theirs]["seconds"][:count], lines[ours]["seconds"][:count])
        bounds = common.interval(ratio, 2)
        found = f"{ratio.estimate:.2f}×{f' ({bounds})' if bounds else ''}"
        is_worth = (ratio.low if ratio.has_bounds else ratio.estimate) > _WORTH
        yield question, found, so[is_worth]


def _answer(line: Mapping[str, Any], sign: str) -> str:
    """The first line with the text `sign` in the last lines of a command's output; if there is none, `no figure`; for a
    failed command, its last line.
    """
    if line["exit_code"] not in (0, 3):
        return f"failed: {line['end'][-1] if line['end'] else ''}"
    return next((said.strip() for said in line["end"] if sign in said), "no figure")


def _of_pair(name: str, result: Result) -> Iterable[tuple[str, str, str]]:
    lines = {line["arm"]: line for line in result.lines}
    ours = [line for line in lines.values() if "decode_ms_per_token" in line]
    regular, speculative = (
        min(
            (line for line in ours if line["arm"].endswith(arm)),
            key=lambda line: line["ms_per_token"],
        )
        for arm in (" regular", " speculative")
    )
    if floor := result.about["floor_ms"]:
        # The time per token after the first token, in the timed run.
        step_ms = regular["decode_ms_per_token"]
        times = step_ms / floor
        found = f"{times:.2f}× ({regular['arm']}: {step_ms:.2f} ms over {floor:.2f} ms)"
        yield f"{name}: a step at most 1.2× the bandwidth floor", found, _reached(times <= 1.2)
    assisted = [line for arm, line in lines.items() if arm.startswith("assisted")]
    if assisted:
        best = min(assisted, key=lambda line: line["ms_per_token"])
        count = min(len(best["seconds"]), len(speculative["seconds"]))
        ratio = common.ratio(best["seconds"][:count], speculative["seconds"][:count])
        arms = f"{speculative['arm']} over {best['arm']}"
        found = (
            f"{ratio.estimate:.2f}× ({'; '.join(filter(None, (common.interval(ratio, 2), arms)))})"
        )
        yield (
            f"{name}: speculative at least 2× assisted generation",
            found,
            _reached(ratio.estimate >= 2),
        )


def _reached(holds: bool) -> str:
    return "reached" if holds else "missed"

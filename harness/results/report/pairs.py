"""Lines of the report: what a run is called among others, which belong to one pair, and the best K of each pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.results.labels import is_real, labels
from harness.results.report.cells import Row
from harness.results.report.rows import Run


def settings_text(row: Mapping[str, Any]) -> dict[str, str]:
    """What readers look at first, beyond pair and K: setting -> how it is said; empty where the row does not say it.

    A run that ended early does not say how many prompts it was asked for.
    """
    ended_early = row.get("status") not in (None, "ok") and not row.get("operands")
    return {name: say(row) for name, say in _SAID.items() if not (ended_early and name == "prompts")}


def _temperature(row: Mapping[str, Any]) -> str:
    value = row.get("temperature")
    return "" if value is None else "greedy" if value == 0 else f"temperature {value:g}"


def _prompts(row: Mapping[str, Any]) -> str:
    number, name = row.get("num_prompts"), row.get("prompts")
    if row.get("operands"):
        return f"{row.get('task')} of {str(row['operands']).replace('-', ' to ')}"
    return f"{number} prompts ({name})" if number and name else ""


def _weights(row: Mapping[str, Any]) -> str:
    quantization, dtype = row.get("quantization"), row.get("dtype")
    return ", ".join(str(part) for part in (quantization, dtype) if part not in (None, "none"))


def _prefixed(name: str, prefix: str, silent: object = None) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row.get(name) in (None, silent) else f"{prefix}{row[name]}"


_SAID: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "prompts": _prompts,
    "max_new_tokens": lambda row: f"{row['max_new_tokens']} new tokens" if row.get("max_new_tokens") else "",
    "batch_size": _prefixed("batch_size", "batches of ", silent=1),
    "temperature": _temperature,
    "top_k": _prefixed("top_k", "top_k ", silent=0),
    "top_p": _prefixed("top_p", "top_p ", silent=1),
    "lenience": lambda row: f"lenience {row['lenience']:g} (lossy)" if (row.get("lenience") or 1) < 1 else "",
    "weights": _weights,
    "devices": _prefixed("devices", "on "),
    "test": lambda row: "test=true" if row.get("test") else "",
    "fault": _prefixed("fault", "fault ", silent="none"),
}
# Said only where two lines would read the same without it.
_FURTHER: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "seed": _prefixed("seed", "seed "),
    "ignore_eos": lambda row: "" if row.get("ignore_eos") is None or row["ignore_eos"] else "ends where the model does",
    "prompts_digest": _prefixed("prompts_digest", "prompt set "),
    "placement": _prefixed("placement", "placement "),
    "chat_template": _prefixed("chat_template", "chat_template "),
    "draft_quantization": _prefixed("draft_quantization", "draft ", silent="none"),
    "draft_dtype": _prefixed("draft_dtype", "draft "),
    "rule": _prefixed("rule", "rule "),
    "repository": _prefixed("repository", ""),
    "draft_repository": _prefixed("draft_repository", "draft "),
    "num_draws": _prefixed("num_draws", "draws "),
    "torch_version": _prefixed("torch_version", "torch "),
    "transformers_version": _prefixed("transformers_version", "transformers "),
    "bitsandbytes_version": _prefixed("bitsandbytes_version", "bitsandbytes "),
    "harness_version": _prefixed("harness_version", "harness "),
    "commit": lambda row: f"commit {short_commit(row['commit'])}" if row.get("commit") else "",
    "timestamp": lambda row: str(row.get("timestamp") or "").replace("T", " ").replace("+00:00", " UTC"),
}


@dataclass(frozen=True)
class Line:
    """An arm of a run, beside the regular arm of the same run.

    Attributes:
        regular: None where the run has no such row.
        row: of the other arm; the regular arm again in a run without a draft.
        pair: `13B with 7B`; the arm where it is not the speculative one, and `random weights` where it has them.
        told_apart: settings in which the lines of the report differ, K left out.
        further: what else tells this line from another that would read the same.
    """

    run: Run
    regular: Row | None
    row: Row
    pair: str
    told_apart: tuple[str, ...]
    further: tuple[str, ...] = ()
    best: bool = False

    @property
    def partial(self) -> bool:
        return self.run.status != "ok"

    @property
    def num_draft_tokens(self) -> int | None:
        return self.row.get("num_draft_tokens")

    @property
    def speedup(self) -> float | None:
        return self.row.get("speedup")

    @property
    def group(self) -> tuple[object, ...]:
        """The same for lines that differ in K, and in nothing that a reader looks at first."""
        return self.pair, self.told_apart

    @property
    def settings(self) -> str:
        """All that tells this line apart, K left out."""
        return " · ".join((*self.told_apart, *self.further))

    def label(self, separator: str = " · ") -> str:
        """One line of text that names this line."""
        k = [f"K={self.num_draft_tokens}"] if self.num_draft_tokens else []
        return separator.join([self.pair, *k, *self.told_apart, *self.further])


def pair_name(row: Mapping[str, Any]) -> str:
    """`13B with 7B`, or the target alone; with what tells a made-up pair from a real one, which is another."""
    arm = "" if row.get("arm") in (None, "regular", "speculative") else f" ({row['arm']})"
    draft = f" with {row['draft']}" if row.get("draft") else ""
    return ", ".join([f"{row.get('model') or 'unknown model'}{draft}{arm}", *labels(row)])


def common_settings(runs: Iterable[Run]) -> str:
    """What all runs have in common, in a line."""
    said = [settings_text(run.last) for run in runs]
    alike = [{texts[name] for texts in said if name in texts} for name in _SAID]
    return " · ".join(text for texts in alike if len(texts) == 1 for text in texts if text)


def latency_lines(runs: Sequence[Run]) -> list[Line]:
    """The lines of `latency`: pairs by their best speed-up, K ascending within a pair, targets alone last.

    All lines of real weights and the real rule come before the others.
    """
    told = _told_apart(runs)
    lines = []
    for run in runs:
        regular = next((row for row in run.rows if row.get("arm") == "regular"), None)
        others = [row for row in run.rows if row.get("arm") != "regular"]
        if not others and not run.last.get("draft"):
            others = [run.last]
        lines += [Line(run, regular, row, pair_name(row), told(run)) for row in others]
    lines = _with_further(lines)
    best = {line.group: line for line in sorted(lines, key=_worth)}
    lines = [
        replace(line, best=line is best[line.group] and line.speedup is not None and not line.partial) for line in lines
    ]
    worth = {group: _worth(line) for group, line in best.items()}
    return sorted(
        lines,
        key=lambda line: (
            not is_real(line.row),
            *(-part for part in worth[line.group]),
            line.pair,
            line.told_apart,
            _k(line),
        ),
    )


def run_lines(runs: Sequence[Run]) -> list[Line]:
    """Lines of the other commands, one a run, by pair."""
    told = _told_apart(runs)
    lines = [Line(run, run.rows[0], run.last, pair_name(run.last), told(run)) for run in runs]
    return sorted(_with_further(lines), key=lambda line: (line.pair, line.told_apart, _k(line)))


def groups(lines: Iterable[Line]) -> list[list[Line]]:
    """Lines of one pair and the same settings, in the order in which the pairs come; K ascending."""
    found: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(line.group, []).append(line)
    return [sorted(group, key=_k) for group in found.values()]


def best_lines(lines: Sequence[Line]) -> list[Line]:
    """Of each pair the line with the best K."""
    return [line for line in lines if line.best]


def predicted_curve(group: Sequence[Line]) -> list[tuple[int, float]]:
    """Speed-up that theory predicts for each K up to a little past the largest measured: (K, speed-up).

    (1 − α^{K+1}) / ((1 − α)(K c + v)) of Leviathan et al. 2023 with what the runs measured: α and c are means over the
    runs; the cost v of verifying K + 1 tokens, in target steps, lies on straight lines between the measured ones and 1
    at K = 0. Empty where no run has these figures.
    """
    known = [line for line in group if _costs(line) is not None]
    if not known:
        return []
    costs = [_costs(line) or (0.0, 0.0) for line in known]
    rates = [float(line.row["conditional_acceptance_rate"]) for line in known]
    alpha = min(sum(rates) / len(rates), 1 - 1e-9)
    draft = sum(cost for cost, _ in costs) / len(costs)
    verify = {0: 1.0} | {_k(line): cost for line, (_, cost) in zip(known, costs, strict=True)}
    largest = max(verify)
    return [
        (k, (1 - alpha ** (k + 1)) / (1 - alpha) / (k * draft + _between(verify, k)))
        for k in range(1, max(largest + 2, 8) + 1)
    ]


def _costs(line: Line) -> tuple[float, float] | None:
    """A draft step (c) and a verification (v) in target steps."""
    row, regular = line.row, line.regular or {}
    step, draft, verify = regular.get("target_step_ms"), row.get("draft_ms"), row.get("verify_ms")
    proposed, rate = row.get("mean_proposed"), row.get("conditional_acceptance_rate")
    if not step or draft is None or verify is None or not proposed or rate is None or not line.num_draft_tokens:
        return None
    return draft / proposed / step, verify / step


def _between(points: Mapping[int, float], x: int) -> float:
    """The polyline through the points at x; past the last point its last piece goes on."""
    places = sorted(points)
    right = next((index for index, place in enumerate(places) if place >= x), len(places) - 1)
    right = max(right, 1)
    a, b = places[right - 1], places[right]
    return points[a] + (points[b] - points[a]) * (x - a) / (b - a)


def _k(line: Line) -> int:
    return line.num_draft_tokens or 0


def _worth(line: Line) -> tuple[int, float]:
    """Orders lines by speed-up: a measured one before a partial one before none."""
    if line.speedup is None:
        return -1, 0.0
    return (0 if line.partial else 1), line.speedup


def _told_apart(runs: Sequence[Run]) -> Callable[[Run], tuple[str, ...]]:
    """A function from a run to the texts of those settings in which the runs differ."""
    said = {run.order: settings_text(run.last) for run in runs}
    differing = [name for name in _SAID if len({texts[name] for texts in said.values() if name in texts}) > 1]
    return lambda run: tuple(text for name in differing if (text := said[run.order].get(name)))


def _with_further(lines: Sequence[Line]) -> list[Line]:
    """Add what tells lines apart that would otherwise read the same."""
    told = list(lines)
    for say in _FURTHER.values():
        names = Counter(line.label() for line in told)
        if max(names.values(), default=0) < 2:
            break
        said = {name: {say(line.row) for line in told if line.label() == name} for name in names}
        told = [
            replace(line, further=(*line.further, say(line.row)))
            if len(said[line.label()]) > 1 and say(line.row)
            else line
            for line in told
        ]
    return told


def short_commit(commit: str) -> str:
    """`17a8ca98e-dirty`."""
    return commit[:9] + ("-dirty" if commit.endswith("-dirty") else "")

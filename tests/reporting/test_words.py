"""Names of rows: what tells jobs apart, and the K that a server reported; and tables on terminals of any width."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from harness.commands.eval.record import EvalSettings
from harness.commands.eval.rows import EvalRow
from harness.commands.latency.record import LatencySettings
from harness.commands.plan.record import PlanSettings
from harness.commands.plan.rows import PlanRow
from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.rows import RecoveryRow
from harness.config.model_names import SECOND_COMMAND
from harness.measuring.measurement import further_settings
from harness.measuring.rows import LatencyRow
from harness.reporting.names import distinct_names
from harness.reporting.table import Column, Line, Table
from harness.reporting.terminal import as_text, print_document
from harness.results.schema import RunRow
from some_settings import settings_of

COMMANDS = [
    (LatencySettings, LatencyRow),
    (EvalSettings, EvalRow),
    (RecoverySettings, RecoveryRow),
    (PlanSettings, PlanRow),
]
# Where results go and how a sweep is carried out.
NOT_MEASURED = {
    "results.file",
    "results.details",
    "results.format",
    "resume",
    "job_timeout_s",
    "force",
}
# A column of the table has it, or (eval's seed) it is only the default of another setting.
SAID_OTHERWISE: dict[type[RunRow], set[str]] = {
    # Repeats are one measurement.
    LatencyRow: {"repeat", "repeats"},
    RecoveryRow: {"num_draws"},
    EvalRow: {"num_prompts", "seed"},
}


def names(settings: Any, prefix: str = "") -> Iterator[str]:
    """Every setting, dotted."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from names(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def changed(settings: Any, name: str) -> Any:
    """The same with another value of one setting, be it one that goes with nothing else."""
    first, _, rest = name.partition(".")
    value = getattr(settings, first)
    found = copy.copy(settings)
    object.__setattr__(found, first, changed(value, rest) if rest else another(name, value))
    return found


def another(name: str, value: Any) -> Any:
    names = {"rule": "block", "weights": "random"}
    if name in names:
        return names[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "another"
    return (5, 6) if isinstance(value, tuple) else (value or 0) + 1


def row_of(kind: type[RunRow], settings: Any) -> RunRow:
    """A row as a run with these settings writes it, without its figures."""
    filled: dict[str, Any] = {"status": "ok", "dtype": "float32", "runner": "eager"}
    filled["settings"] = further_settings(settings, kind)
    if kind is EvalRow:
        filled |= {"operands": "-".join(map(str, settings.operands)), "seed": "all"}
    if hasattr(settings, "num_prompts"):
        filled["num_prompts"] = settings.num_prompts
    return kind(**(kind.setting_columns(settings) | filled))


@pytest.mark.parametrize(("kind", "row"), COMMANDS)
def test_every_setting_tells_jobs_apart(kind: type, row: type[RunRow]) -> None:
    settings = settings_of(kind)
    found = set(names(settings)) - NOT_MEASURED - SAID_OTHERWISE.get(row, set())
    assert len(found) > 40
    alike = set()
    for name in found:
        rows = [row_of(row, settings), row_of(row, changed(settings, name))]
        if len({one.label() for one in distinct_names(rows)}) == 1:
            alike.add(name)
    assert not alike


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        # Another flag may have the same number.
        ("-np 4 --spec-draft-n-max {K}", ["", "", ""]),
        ('--speculative-config {{"method": "eagle3", "num_speculative_tokens": {K}}}', ["", "", ""]),
        ("K={K} -np {other}", ["-np 1", "-np 3", "-np 7"]),
        ("--top {other} -k {K}", ["--top 1", "--top 3", "--top 7"]),
        ("--m{other} {other}", ["--m1 1", "--m3 3", "--m7 7"]),
        # Compact JSON is one word, of which K is only a part.
        ("-c {{k:{K},max:{other}}}", ["-c {k:2,max:1}", "-c {k:4,max:3}", "-c {k:8,max:7}"]),
    ],
)  # fmt: skip
def test_commands_that_differ_in_k_alone_have_one_name(flags: str, names: list[str]) -> None:
    """So that runs of a sweep over K are one pair with several K."""
    rows = []
    for k, other in ((2, 1), (4, 3), (8, 7)):
        commands = ["serve A", f"serve A {flags.format(K=k, other=other)}"]
        rows.append(LatencyRow(model="A", draft="B", num_draft_tokens=k, server_command=commands))
    found = distinct_names(rows)
    assert [name.settings.get("server_command", "") for name in found] == names
    assert [name.num_draft_tokens for name in found] == [2, 4, 8]
    # The groups stay the same beside another server whose K is unknown.
    unknown = LatencyRow(model="A", draft="B", server_command=["serve A", "serve A -np 9 -k 4"])
    groups = {name.group for name in distinct_names([*rows, unknown])[:3]}
    assert len(groups) == len(set(names))


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        ([{"model": "runs/llama/13B"}], ["13B with 7B"]),
        ([{"seed": 0}, {"batch_size": 4, "seed": 0}, {"batch_size": 4, "seed": 1}],
         ["13B with 7B · seed 0", "13B with 7B · batches of 4 · seed 0", "13B with 7B · batches of 4 · seed 1"]),
        ([{"model": "./13B"}, {"model": "13B"}], ["13B with 7B · model ./13B", "13B with 7B · model 13B"]),
        ([{"draft": "a", "draft_weights_identity": "1"}, {"draft": "b", "draft_weights_identity": "2"}],
         ["13B with a", "13B with b"]),
        ([{"server_command": ["s -k 2"]}, {"server_command": ["s -k 3 5 -z"]}, {}],
         ["13B with 7B · -k 2", "13B with 7B · -k 3 5 -z", "13B with 7B"]),
        ([{"server_command": ["s -p 1", "s -k 2"]}, {"server_command": ["s -p 2", "s -k 3"]}],
         ["13B with 7B · -k 2 against -p 1", "13B with 7B · -k 3 against -p 2"]),
        # Both commands of the first row have `-t 1`, which is no difference between them.
        ([{"server_command": ["s -t 1", "s -t 1 -k 2"]}, {"server_command": ["s", "s -t 1 -k 3"]}],
         ["13B with 7B · -k 2", "13B with 7B · -k 3"]),
        ([{"engine": "server", "draft": SECOND_COMMAND, "server_command": [f"s -np {n}", f"s -np {n} {more}"]}
          for n, more in ((1, "-k 2"), (2, "-k 2"), (2, "-k 3"))],
         ["13B against the first command · -k 2, both -np 1",
          "13B against the first command · -k 2, both -np 2",
          "13B against the first command · -k 3, both -np 2"]),
        ([{"engine": "server", "draft": SECOND_COMMAND, "server_command": ["s -np 1 -k 2", f"s -np 1{more}"]}
          for more in ("", " -k 3")],
         ["13B against the first command · against -k 2", "13B against the first command · -k 3 against -k 2"]),
        # A circumstance only where settings do not suffice.
        ([{"torch_version": "1"}, {"torch_version": "2"}, {"torch_version": "3", "draft": "lookup"}],
         ["13B with 7B · torch_version 1", "13B with 7B · torch_version 2", "13B with lookup"]),
        # Flags of both arms come once.
        ([{"server_command": ["s -c 2", "s -c 2 -k 2"]}, {"server_command": ["s -c 3", "s -c 3 -k 2"]}],
         ["13B with 7B · -c 2", "13B with 7B · -c 3"]),
        ([{"server_command": ["s 2 9"], "num_draft_tokens": 2, "settings": {"engine.start_command": "s {K}"}},
          {"server_command": ["s 3 8"], "num_draft_tokens": 3, "settings": {"engine.start_command": "s {K}"}}],
         ["13B with 7B · K=2", "13B with 7B · K=3"]),
        ([{"settings": {"draft.gpus": 1}}, {"settings": {"draft.gpus": 1, "placement.reserve_gb": 2.5}}],
         ["13B with 7B", "13B with 7B · placement.reserve_gb 2.5"]),
        # What was counted is no K: a server may change it as it goes.
        ([{"num_draft_tokens": 4}, {"url": "http://a/v1", "mean_proposed": 2.0}],
         ["13B with 7B · K=4", "13B with 7B · url a"]),
    ],
)  # fmt: skip
def test_rows_are_named_by_what_they_differ_in(rows: list[Any], labels: list[str]) -> None:
    named = distinct_names([LatencyRow(**{"model": "13B", "draft": "7B"} | row) for row in rows])
    assert [name.label() for name in named] == labels


HEADINGS = ["regular\nms/token", "spec.\nms/token", "speed-up", "95 %\ninterval", "predicted"]
HEADINGS += ["accepted", "memory"]
CELLS = ["105.21 ± 10.30", "47.85", "2.24×", "2.14 to 2.36", "2.39×", "83.7%", "3.3 MB"]


def printed(width: int, *pairs: str) -> str:
    columns = (Column("pair", text=True), Column("K"), *map(Column, HEADINGS))
    filled = [
        replace(column, of=lambda item, place=place: (*item, *CELLS)[place])
        for place, column in enumerate(columns)
    ]
    items = [(pair, k) for pair in pairs for k in (2, 4)]
    text = io.StringIO()
    print_document([Table.of("pairs", "Speed-up", items, filled)], Console(file=text, width=width))
    return text.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_table_that_is_too_wide_names_the_columns_that_it_leaves_out(width: int) -> None:
    long = "meta-llama/Llama-3.1-70B-Instruct with meta-llama/Llama-3.2-1B"
    text = printed(width, "tiny with tiny_draft", long)
    assert max(map(len, text.splitlines())) <= width
    table, left_out = text.split("Without room here: ")
    num_left = left_out.count(";") + 1
    assert 0 < num_left < len(HEADINGS)
    assert (
        "".join(left_out.split())
        == "; ".join(heading.replace("\n", " ") for heading in HEADINGS[-num_left:]).replace(
            " ", ""
        )
        + "."
    )
    # The others are whole.
    assert all(table.count(cell) == 4 for cell in CELLS[:-num_left])
    assert all(table.count(cell) == 0 for cell in CELLS[-num_left:])
    assert table.count("│ 4 │") == 2


def test_text_for_files_has_whole_names_and_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    # In a notebook, Rich shows text in the cell.
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    name = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    text = as_text([Line(f"{'a' * 60} · temperature=0.0 · model={name} · seed=0", "warning")], 100)
    assert "\x1b" not in text
    assert name in text
    # A headline is wrapped as what stands below it.
    headline = as_text([Line("  Fastest: " + "a word " * 20, "good", "95 % interval")], 80)
    assert max(map(len, headline.splitlines())) <= 80

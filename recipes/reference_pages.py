"""Makes the site's pages about columns and settings from the descriptions in their classes (used by
`scripts/site.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from harness.cli import names
from harness.cli.conversion import value_types
from harness.commands.registry import configured, row_kinds, with_settings
from harness.config.errors import as_typed
from harness.config.methods import METHODS
from harness.config.run import RunSettings
from harness.engines.record import ENGINES
from recipes.described import (
    GROUPS,
    Setting,
    columns_by_topic,
    command_settings,
    described,
    engine_settings,
    group_settings,
    method_settings,
    sentence,
)


def columns_page() -> str:
    """`columns.md`: every column of every CSV file."""
    parts = [
        "# Columns of the CSV files",
        "`harness help columns` prints the same.",
        "One row is one arm of one run; the speed-up is in the row of the speculative arm. The last cell names the "
        "files that have the\ncolumn, without `.csv`; *runs* are `latency`, `acceptance`, `compare`, `eval`, "
        "`recovery` and `plan`. Lists and dicts are JSON.",
        "A figure with an interval, `speedup ±`, has further columns: `speedup_low` and `speedup_high` are its 95 % "
        "interval,\n`speedup_covers` says over what, as JSON: "
        '`{"num_units": 15, "unit": "prompt", "num_runs": 5}`.',
        _EXAMPLE,
        "Texts are written exactly as they are, so that pandas reads what was measured: a prompt or completion may "
        "begin with `=`,\n`+`, `-` or `@`. In a spreadsheet import text columns as text, not as formulas.",
    ]
    runs = [kind.kind for kind in row_kinds() if "status" in kind.columns()]
    for topic, columns in columns_by_topic().items():
        lines = ["| column | type | unit | meaning | in |", "|---|---|---|---|---|"]
        for column, files in columns.items():
            named = "runs" if files == runs else ", ".join(files)
            lines.append(
                f"| `{column.name}` | {column.type} | {column.unit} | {column.meaning} | {named} |"
            )
        parts += [f"## {topic}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


_EXAMPLE = """\
```python
import pandas

rows = pandas.read_csv("results/latency.csv")
rows = rows[(rows.status == "ok") & (rows.arm == "speculative")]
print(rows[["model", "draft", "speedup", "speedup_low", "speedup_high"]])
```"""


def departures(command: str) -> Mapping[str, Any]:
    """The values, by setting, that a command's file in `conf/` gives to settings that all commands have."""
    departing: dict[str, Any] = {}
    for name, value in names.load_preset(command).items():
        if name in GROUPS:
            departing |= {f"{name}.{last}": setting for last, setting in value.items()}
        elif name in value_types(RunSettings):
            departing[name] = value
    return departing


def settings_page() -> str:
    """`settings.md`: every setting."""
    parts = [
        "# Settings",
        "`harness help COMMAND all` prints the same.",
        "## Of all commands",
        _settings_table(described(RunSettings)),
    ]
    for group in GROUPS:
        first_line = (GROUPS[group].__doc__ or "").partition("\n")[0]
        parts += [f"### {group}", first_line, _settings_table(group_settings(group))]
    for command in map(configured, with_settings()):
        parts += [f"## {command.name}", sentence(command.summary)]
        _, own = command_settings(command.settings)
        if own:
            parts.append(_settings_table(own))
        if other := departures(command.name):
            listed = ", ".join(f"`{name}={as_typed(value)}`" for name, value in other.items())
            parts.append(f"Other defaults here: {listed}.")
    parts.append("## What drafts")
    for name, method in METHODS.all().items():
        # `model` is not a value of `draft=`.
        title = f"draft={name}" if method.named else name
        parts += [f"### {title}", sentence(method.summary)]
        if own := method_settings(method.settings):
            parts.append(_settings_table(own))
    parts.append("## Engines")
    for name, engine in ENGINES.all().items():
        parts += [f"### engine={name}", sentence(engine.summary)]
        if own := engine_settings(engine.settings):
            parts.append(_settings_table(own))
    return "\n\n".join(parts) + "\n"


def _settings_table(settings: Iterable[Setting]) -> str:
    lines = ["| setting | default | choices | |", "|---|---|---|---|"]
    for setting in settings:
        default = "" if setting.value is dataclasses.MISSING else as_typed(setting.value)
        cells = [
            f"`{setting.name}`",
            f"`{default}`" if default else "",
            " ".join(f"`{choice}`" for choice in setting.choices),
            setting.meaning.replace("|", "\\|"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


PAGES = {"columns.md": columns_page, "settings.md": settings_page}

"""Documents name every record of a registry and say what it says; what they name is there."""

import re
from pathlib import Path

import pytest

from harness.cli.conversion import setting_hints
from harness.cli.typed import settings_named_like
from harness.commands.registry import COMMANDS, configured, with_settings
from harness.config.acceptance_rules import RULES
from harness.config.methods import METHODS
from harness.config.settings import DecodingSettings
from harness.engines.record import ENGINES
from harness.local.drafting.heads.checkpoint import KINDS
from harness.measuring.rows import LatencyRow
from harness.reporting.page import lossless_again
from harness.reporting.words import arm_name, lossy_warning, setting_in_words
from harness.results.drafts import PRINTED
from harness.servers.dialects import DIALECTS
from recipes.reference_pages import PAGES
from report_files import latency_run

DOCS = Path(__file__).parents[1] / "docs"
DRAFTED_BY = [f"`{name}`" for name, record in METHODS.all().items() if record.named]
FURTHER = [kind for name in with_settings() for kind in getattr(COMMANDS[name], "further_rows", ())]
STARTED = [dialect for dialect in DIALECTS.all().values() if dialect.startup.programs]

# Below a heading of a page each of these has a row of a table, or stands in a sentence.
NAMED = {
    "commands": ("commands.md", "Commands", [f"`{name}`" for name in COMMANDS.names()]),
    "rules": ("settings.md", "decoding", [f"`{name}`" for name in RULES.names()]),
    "engines": ("settings.md", "Engines", [f"engine={name}" for name in ENGINES.names()]),
    "ways to draft": ("engines.md", "What drafts", DRAFTED_BY),
    "heads": ("engines.md", "What drafts", [kind.title for kind in KINDS.values()] + ["DSpark"]),
    "figures of others": ("counted.md", "What others print", [each.name for each in PRINTED]),
    "files": ("files.md", "File formats", [f"{kind.kind}.csv`" for kind in FURTHER]),
    "servers": ("served-pairs.md", "Commands", [dialect.title for dialect in STARTED]),
    "programs": ("served-pairs.md", "Commands", [one.startup.programs[0] for one in STARTED]),
}


def section(page: str, heading: str) -> str:
    """What stands below a heading, up to the next one."""
    text = PAGES[page]() if page in PAGES else (DOCS / page).read_text(encoding="utf-8")
    _, found, rest = text.partition(f"# {heading}\n")
    assert found, (page, heading)
    return rest.partition("\n## ")[0]


@pytest.mark.parametrize("records", NAMED)
def test_a_page_names_each(records: str) -> None:
    page, heading, names = NAMED[records]
    text = section(page, heading)
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize("name", RULES.names())
def test_what_is_said_of_a_rule_is_what_its_record_says(name: str) -> None:
    rule = RULES[name]
    settings = DecodingSettings(rule=name)
    assert settings.lossy != rule.lossless
    row = latency_run(rule=name, temperature=0.5, lossy=settings.lossy)[-1]
    assert ("(lossy)" in arm_name(row)) == settings.lossy
    assert ("(lossy)" in (setting_in_words(row, "rule") or "")) == settings.lossy
    assert (lossy_warning(row) is not None) == settings.lossy
    again = lossless_again(row)
    assert (again.changes if again else None) == ("rule=deepmind" if settings.lossy else None)


def test_the_rule_of_every_column_of_a_pooled_row_is_documented() -> None:
    rules = {}
    for line in section("numbers.md", "Pooled rows").splitlines():
        rule, columns = line.strip("| ").partition(" | ")[::2]
        rules[rule.partition(" (")[0]] = set(re.findall(r"`(\w+)`", columns))
    described = LatencyRow.columns().items()
    for name, column in described:
        rule = f"{column.pools}, weighted by `{column.per}`" if column.per else column.pools
        if column.part in ("", "estimate") and rule not in (None, "mean"):
            assert name in ("speedup", "pooled_runs") or rules[rule].remove(name) is None
    rules["mean"] -= {name for name, column in described if column.pools == "mean"}
    assert not set().union(*rules.values())


# Words that several settings end with: these are typed with their group.
AMBIGUOUS = set(
    "architecture file gguf_file gpus lengths name quantization repository revision tokenizer trust_remote_code".split()
)


def test_no_new_setting_takes_the_short_name_of_another() -> None:
    """`max_ngram=5` means `draft.max_ngram` as long as no other setting ends so."""
    for command in with_settings():
        names = setting_hints(configured(command).settings)
        words = {name.rpartition(".")[2] for name in names}
        several = {word for word in words if len(settings_named_like(word, names)) > 1}
        assert several <= AMBIGUOUS, (
            f"these could be typed alone with {command}, until a setting was added that ends so too: give it another"
            " name, or list the word in AMBIGUOUS and in the changelog"
        )


@pytest.mark.parametrize(
    ("page", "name"), [("served-pairs.md", "MINE"), ("losslessness.md", "EarlyBonus")]
)
def test_the_code_of_a_page_can_be_loaded(page: str, name: str) -> None:
    """That of your-own-method.md is measured with, in tests/cli/test_own_methods.py."""
    _, _, rest = (DOCS / page).read_text(encoding="utf-8").partition("```python\n")
    loaded: dict[str, object] = {}
    exec(rest.partition("```")[0], loaded)
    assert name in loaded


ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`((?:conf|harness|tests|recipes|benchmarks)/[\w./]*)`", TEXT)))
CLASSES = re.findall(r"`(\w+)`\s\(`(harness/[\w/]+\.py)`\)", TEXT)
assert len(PATHS) > 20
assert len(CLASSES) >= 6


@pytest.mark.parametrize("path", PATHS)
def test_a_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("name", "file"), CLASSES)
def test_a_class_is_in_its_file(name: str, file: str) -> None:
    assert re.search(rf"^class {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)

"""A rule of acceptance in one file of the user's: `decoding.rule=./likely.py:Likely`."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest

from harness.config.acceptance_rules import RULES
from harness.config.sizes import PACKAGE
from in_process import Harness, results
from wording import mentions

PAGE = PACKAGE.parent / "docs" / "your-own-method.md"
FURTHER = textwrap.dedent(
    '''


    class Lax(Likely):
        num_likeliest = 50


    class Exact(Likely):
        """Greedily the target's own token alone."""

        lossless_greedily = True
        num_likeliest = 1


    class Lying(Likely):
        lossless = True
        num_likeliest = 50


    class Broken(Likely):
        def verify(self, offer: Offer) -> Verdict:
            raise ValueError("no idea")
    '''
)
QUICK = ["model=tiny_draft", "draft=tiny_draft", "num_prompts=2", "decoding.max_new_tokens=12"]


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_methods: None) -> Path:
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n# likely.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "likely.py").write_text(code + FURTHER)
    return tmp_path


def test_a_lossy_rule_accepts_more_and_is_called_lossy(harness: Harness, rules: Path) -> None:
    # A target whose draft is another model, which it rejects.
    pair = ["model=tiny", "draft=tiny_draft"]
    shown = harness("latency", *QUICK, *pair, "decoding.rule=./likely.py:Lax")
    assert "lossy" in shown.stdout
    harness("latency", *QUICK, *pair)
    rows = results("latency")
    drafted = rows[rows["arm"] == "speculative"]
    assert drafted["rule"].tolist() == ["./likely.py:Lax", "deepmind"]
    assert drafted["lossy"].tolist() == [True, False]
    own, exact = drafted["acceptance_rate"]
    assert own > exact


def test_a_rule_that_is_lossless_greedily_keeps_greedy_texts(harness: Harness, rules: Path) -> None:
    asked = [*QUICK, "decoding.temperature=0", "runner=static"]
    shown = harness("recovery", *asked, "decoding.rule=./likely.py:Exact")
    assert mentions(shown.stdout, "10 of 10 identical")
    assert not results("recovery")["lossy"].any()
    lossy = harness("recovery", *asked, "decoding.rule=./likely.py:Likely", code=1)
    assert "lossy" in lossy.complaint


def test_a_rule_that_calls_itself_lossless_is_held_to_its_word(
    harness: Harness, rules: Path
) -> None:
    asked = ["model=tiny", "draft=tiny_draft", *QUICK[2:], "temperature=0"]
    refused = harness("latency", *asked, "decoding.rule=./likely.py:Lying", code=3)
    assert re.search(r"agree on \d of 2 prompts, and part at a logit margin", refused.complaint)
    row = results("latency").iloc[-1]
    assert not row["lossy"], "it follows `lossless`"
    assert row["status"] == "no_verdict"
    assert row["margin_over_rounding"] > 1


def test_a_changed_rule_is_another_measurement(harness: Harness, rules: Path) -> None:
    file = rules / "likely.py"
    for most in (3, 2):
        changed = file.read_text().replace("num_likeliest = 3", f"num_likeliest = {most}")
        file.write_text(changed)
        harness("latency", *QUICK, "decoding.rule=./likely.py:Likely")
        sys.modules.pop("likely")
        RULES._loaded.clear()
    assert len(results("latency")["measurement"].unique()) == 2


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Broken", r"verify\(\) raised ValueError: no idea"),
        ("Missing", "no attribute 'Missing'|has no"),
    ],
)
def test_a_wrong_rule_ends_with_a_line_that_names_it(
    harness: Harness, rules: Path, name: str, wrong: str
) -> None:
    """What a verdict must be is in `test_checked`."""
    asked = [*QUICK, "batch_size=2", f"decoding.rule=./likely.py:{name}"]
    shown = harness("latency", *asked, code=2 if name == "Missing" else 1)
    assert re.search(rf"decoding\.rule=\./likely\.py:{name}: .*({wrong})", shown.complaint)


def test_a_rule_that_tests_no_single_token_has_no_rate_of_those_tested(
    harness: Harness, rules: Path
) -> None:
    file = rules / "likely.py"
    file.write_text(file.read_text() + "\n\nclass Whole(Likely):\n    tests_each_token = False\n")
    by_each = harness("latency", *QUICK, "details=true", "decoding.rule=./likely.py:Likely")
    assert mentions(by_each.stdout, "rule ./likely.py:Likely", "no longer follows the target")
    assert "of those tested" in by_each.stdout
    as_whole = harness("latency", *QUICK, "details=true", "decoding.rule=./likely.py:Whole")
    assert "of those tested" not in as_whole.stdout

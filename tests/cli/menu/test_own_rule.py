"""A rule of acceptance in one file of the user's: `decoding.rule=./likely.py:Likely`."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from harness.config.sizes import PACKAGE
from in_process import Harness, results

PAGE = PACKAGE.parent / "docs" / "your-own-method.md"
FURTHER = textwrap.dedent(
    """


    class Lax(Likely):
        num_likeliest = 50


    class Lying(Likely):
        lossless = True
        num_likeliest = 50
    """
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

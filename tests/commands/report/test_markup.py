"""Markup and escape sequences in what users name: printed as text, by a run and by `report`, in all three renderers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from harness.config.sizes import PACKAGE
from in_process import Harness

MARKUP = "math [/no_think] <b>&amp;</b> *x*"
ESCAPE = "\x1b[31mred\x1b]0;title\x07 \x9b2J"


def test_names_are_text_wherever_they_are_shown(harness: Harness, tmp_path: Path) -> None:
    model = "./[bold red]m <i>"
    shutil.copytree(PACKAGE / "local" / "models" / "shipped" / "tiny_draft", tmp_path / model)
    prompts = [
        {"prompt": f"{MARKUP} {number} {ESCAPE}", "category": name}
        for name in (MARKUP, ESCAPE)
        for number in (1, 2)
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    quick = ["num_prompts=4", "decoding.max_new_tokens=4", "prompts=p.jsonl"]
    ran = harness("latency", f"model={model}", "draft=tiny_draft", *quick)
    shown = harness("report", "results", "outputs")
    for text in (ran.summary, shown.stdout):
        # The terminal wraps where it likes.
        words = "".join(text.split()).replace("│", "")
        assert "[boldred]m<i>" in words
        if text is ran.stdout:
            assert "[/no_think]" in words
            assert "␛[31mred␛]0;title␇" in words
        assert not {"\x1b", "\x07", "\x9b"} & set(text + ran.stderr)
    page = (tmp_path / "results" / "report.html").read_text()
    assert "math [/no_think] &lt;b&gt;&amp;amp;&lt;/b&gt; *x*" in page
    assert "&lt;i&gt;" in page
    assert "<i>" not in page
    markdown = (tmp_path / "results" / "report.md").read_text()
    assert "math \\[/no\\_think\\] &lt;b&gt;&amp;amp;&lt;/b&gt; \\*x\\*" in markdown.replace(
        "no_think", "no\\_think"
    )
    assert not {"\x1b", "\x07"} & set(page + markdown)

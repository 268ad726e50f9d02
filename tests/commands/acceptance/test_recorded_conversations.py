"""Recorded conversations: each answer counts as if it were decoded after its own prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from in_process import QUICKEST_PAIR, Harness, only, results

ASKED = "Once upon a time there was a lazy puppy named Theo."
FIRST = "Theo had a red scarf. Theo had a red scarf."
MORE = "Theo had a blue kite."
SECOND = "Theo had a blue kite. Theo had a red scarf."


def write(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"prompts={file}"


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return {"messages": messages, **more}


def test_each_answer_counts_as_if_it_stood_alone(harness: Harness, tmp_path: Path) -> None:
    conversation = write(tmp_path / "chat.jsonl", chat(ASKED, FIRST, MORE, SECOND))
    before = f"user: {ASKED}\nassistant:"
    apart = write(
        tmp_path / "apart.jsonl",
        {"prompt": before, "completion": f" {FIRST}"},
        {"prompt": f"{before} {FIRST}\nuser: {MORE}\nassistant:", "completion": f" {SECOND}"},
    )
    outcome = harness("acceptance", *QUICKEST_PAIR, conversation, "up_to=3", "chat_template=never")
    assert "2 turns given" in outcome.stdout
    together = pd.read_csv(only("acceptance_texts.csv"))
    harness("acceptance", *QUICKEST_PAIR, apart, "up_to=3", "chat_template=never")
    joint, alone = (rows for _, rows in results("acceptance").groupby("run", sort=False))
    assert joint.tokens_per_iteration.tolist() == pytest.approx(alone.tokens_per_iteration.tolist())
    assert joint.log_probability.iloc[0] == pytest.approx(alone.log_probability.iloc[0], abs=1e-4)
    assert together.turn.tolist() == [1, 2]
    assert together.prompt_index.tolist() == [0, 0]
    iterations = [json.loads(text)[2] for text in together.iterations_by_num_draft_tokens]
    first, second = together.num_tokens / iterations
    shown = " ".join(outcome.stdout.split())
    assert f"Turn 1 {first:.2f} · 2 to 3 {second:.2f}" in shown


AS_TEXT = ("chat_template=never",)
TOOLS = {"tools": [{"type": "function", "function": {"name": "find"}}]}


@pytest.mark.parametrize(
    ("row", "typed", "line"),
    [
        (chat(ASKED, FIRST), (), "chat_template=auto: this model's tokenizer has none"),
        (chat(ASKED, FIRST, **TOOLS), AS_TEXT, "chat_template=never: 1 of 1 prompts have tools"),
        (chat(ASKED, ""), AS_TEXT, "has no answer of two tokens or more"),
    ],
)
def test_conversations_that_cannot_be_read(
    harness: Harness, tmp_path: Path, row: dict[str, Any], typed: tuple[str, ...], line: str
) -> None:
    file = write(tmp_path / "chat.jsonl", row)
    assert line in harness.refused("acceptance", *QUICKEST_PAIR, file, "up_to=2", *typed)

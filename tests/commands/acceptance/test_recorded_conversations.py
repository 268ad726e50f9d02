"""Recorded conversations: each answer counts as if it were decoded after its own prompt, and parts add up."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.commands.acceptance.measure import AcceptanceOfTexts
from harness.commands.acceptance.page import lines_of_parts, slower_at
from harness.results.price.value import IterationCost
from harness.results.rows.acceptance import AcceptancePartRow, AcceptanceTextRow
from harness.results.statistics.interval import Interval
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
    parts = pd.read_csv(only("acceptance_parts.csv"))
    harness("acceptance", *QUICKEST_PAIR, apart, "up_to=3", "chat_template=never")
    joint, alone = (rows for _, rows in results("acceptance").groupby("run", sort=False))
    assert joint.tokens_per_iteration.tolist() == pytest.approx(alone.tokens_per_iteration.tolist())
    assert joint.log_probability.iloc[0] == pytest.approx(alone.log_probability.iloc[0], abs=1e-4)
    assert together.turn.tolist() == [1, 2]
    assert together.prompt_index.tolist() == [0, 0]
    # The parts have all tokens and all iterations.
    iterations = np.sum([*map(ast.literal_eval, together.iterations_by_num_draft_tokens)], axis=0)
    at_k = parts[parts.num_draft_tokens == 2]
    assert at_k.num_tokens.sum() == together.num_tokens.sum()
    part_iterations = (at_k.num_tokens / at_k.tokens_per_iteration).sum()
    assert part_iterations == pytest.approx(iterations[1], abs=1e-4)
    assert parts.part.unique().tolist() == ["1", "2 to 3"]


AS_TEXT = ("chat_template=never",)
TOOLS = {"tools": [{"type": "function", "function": {"name": "find"}}]}


@pytest.mark.parametrize(
    ("row", "typed", "line"),
    [
        (chat(ASKED, FIRST), (), "chat_template=auto: this model's tokenizer has none"),
        (chat(ASKED, FIRST, **TOOLS), AS_TEXT, "chat_template=never: 1 of 1 prompts have tools"),
        (chat(ASKED, ""), AS_TEXT, "has no answer of two tokens or more"),
        (chat(ASKED, 300 * FIRST), AS_TEXT, "1 of 1 prompts are too long with their answers"),
    ],
)
def test_conversations_that_cannot_be_read(
    harness: Harness, tmp_path: Path, row: dict[str, Any], typed: tuple[str, ...], line: str
) -> None:
    file = write(tmp_path / "chat.jsonl", row)
    assert line in harness.refused("acceptance", *QUICKEST_PAIR, file, "up_to=2", *typed)


def test_a_turn_costs_what_an_iteration_does_at_its_context(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the mean context neither turn would pay; the first one's is shorter, and pays."""

    def costs(_: AcceptanceOfTexts, placed: object, prompt_tokens: int) -> IterationCost:
        steps = 1.0 if prompt_tokens < 100 else 9.0
        return IterationCost.from_steps({1: steps, 2: steps}, "planted")

    monkeypatch.setattr(AcceptanceOfTexts, "_costs", costs)
    file = write(tmp_path / "chat.jsonl", chat(ASKED, FIRST, 50 * f"{MORE} ", SECOND))
    harness("acceptance", *QUICKEST_PAIR, file, "up_to=2", "chat_template=never")
    assert pd.read_csv(only("acceptance_texts.csv")).slower_at.tolist() == ["[]", "[1, 2]"]


def part(name: str, *speedups: tuple[float, float, float]) -> list[AcceptancePartRow]:
    return [
        AcceptancePartRow(
            run="r",
            part=name,
            num_tokens=9,
            num_draft_tokens=k,
            tokens_per_iteration=Interval(2 * estimate, 2 * low, 2 * high),
            expected_speedup=Interval(estimate, low, high),
        )
        for k, (estimate, low, high) in enumerate(speedups, start=1)
    ]


def test_what_is_faster_without_speculation_is_named_with_each_k() -> None:
    fast, slow, open_ = (1.5, 1.4, 1.6), (0.8, 0.7, 0.9), (0.95, 0.8, 1.1)
    assert slower_at(part("1", fast, open_, fast)) is None
    assert slower_at(part("1", fast, slow, slow)) == "K=2, 3"
    assert slower_at(part("1", fast, slow, slow, slow)) == "K=2 to 4"
    assert slower_at(part("1", slow, slow, slow)) == "every K"
    parts = [*part("1", fast, open_, slow), *part("2 to 3", slow, slow, slow)]
    turns = [
        AcceptanceTextRow(run="r", turn=1, slower_at=numbers) for numbers in ([], [3], [1, 2, 3])
    ]
    lines = dict(lines_of_parts(parts, turns, 3))
    assert lines["Turn"] == "1 1.60 · 2 to 3 1.60"
    assert lines["Slower"] == "2 of 3 turns at K=3"
    assert dict(lines_of_parts(part("1", fast), turns[:1], 1))["Slower"] == "no turn at K=1"

"""`acceptance`: what it computes is what decoding does, of recorded conversations too, and what it prints of it."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.commands.acceptance.page import acceptance_page
from harness.reporting.table import Table
from harness.results.files import append_rows
from harness.results.rows.acceptance import TEXTS_FILE, AcceptanceRow, AcceptanceTextRow
from harness.results.runs import Run
from harness.results.statistics.interval import Interval
from in_process import QUICK_MODELS, QUICKEST_PAIR, Harness, only, results
from report_files import run_id
from shipped_copies import ONE_LAYER, copy_shipped

SHORT = ["decoding.max_new_tokens=20", "decoding.ignore_eos=true"]


def texts() -> pd.DataFrame:
    return pd.read_csv(only("acceptance_texts.csv"))


def texts_of(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.read_csv(Path(rows.directory.iloc[0]) / "acceptance_texts.csv")


@pytest.mark.parametrize(
    ("pair", "k"),
    [(QUICKEST_PAIR, 5), (QUICK_MODELS, 2), (["model=tiny", "draft=tiny_eagle3"], 5)],
    ids=["lookup", "model", "head"],
)
def test_greedy_iterations_are_those_of_decoding(harness: Harness, pair: list[str], k: int) -> None:
    """Without coins the expected number of iterations is the number that decoding takes, text by text."""
    asked = [*pair, "decoding=greedy", "num_prompts=2", "tokens=12", "decoding.ignore_eos=true"]
    harness("latency", *asked, f"K={k}", "num_warmup=0")
    decoded = pd.read_csv(only("latency_prompts.csv")).query("arm == 'speculative'")
    # The K that was typed leads, and is computed beyond `up_to`.
    outcome = harness("acceptance", *asked, "up_to=1", f"K={k}")
    assert f" tokens per iteration at K={k} " in outcome.stdout
    found = texts().set_index("prompt_index")["iterations_by_num_draft_tokens"].map(json.loads)
    for _, row in decoded.iterrows():
        assert found[row.prompt_index][k - 1] == pytest.approx(row.num_iterations, abs=1e-6)
    rows = results("acceptance")
    measured = results().query("arm == 'speculative'").iloc[0]
    rates = ["acceptance_rate", "conditional_acceptance_rate"]
    for column in ("tokens_per_iteration", "mean_acceptance_length", *rates):
        assert rows[column][k - 1] == pytest.approx(measured[column])
    by_position = json.loads(rows.marginal_acceptance_by_position[k - 1])
    counted = json.loads(measured.marginal_acceptance_by_position)
    assert by_position[: len(counted)] == pytest.approx(counted, abs=1e-4)


def test_a_run_says_the_answer(harness: Harness) -> None:
    outcome = harness("acceptance", *QUICK_MODELS, "num_prompts=9", "up_to=6", *SHORT)
    rows = results("acceptance")
    assert rows.num_draft_tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert rows.tokens_per_iteration.is_monotonic_increasing
    assert (rows.tokens_per_iteration_low < rows.tokens_per_iteration).all()
    assert (rows.tokens_per_iteration < rows.tokens_per_iteration_high).all()
    # At a temperature above 0 four texts of each prompt, each with other random numbers.
    assert (rows.num_texts == 36).all()
    by_prompt = texts().groupby("prompt_index")
    assert (by_prompt.size() == 4).all()
    assert (by_prompt.token_ids.nunique() > 1).any()
    # Its own texts are as likely as its own texts.
    assert rows.likelihood_z.abs().max() < 4
    # The K of the settings, below a title that takes two lines where the name of the CPU is long.
    found = f"{rows.tokens_per_iteration[3]:.2f} tokens per iteration at K=4"
    assert found in outcome.stdout.split("\n\n")[1]
    # The same lengths, without the settings that `latency` lacks.
    command = f"harness latency {' '.join([*QUICK_MODELS, *SHORT])} K=4"
    assert " ".join(outcome.stdout.split()).endswith(command)
    assert len([line for line in outcome.stdout.splitlines() if line.strip()]) <= 12


def test_texts_of_logs_and_of_earlier_runs(harness: Harness, tmp_path: Path) -> None:
    harness("acceptance", *QUICKEST_PAIR, "num_prompts=4", "up_to=4", *SHORT)
    own = texts()
    directory = only("acceptance_texts.csv").parent

    harness("acceptance", *QUICKEST_PAIR, f"prompts={directory}", "up_to=4")
    first, again = (group for _, group in results("acceptance").groupby("run", sort=False))
    assert again.text_source.unique() == ["given"]
    # Texts of one prompt are still counted together.
    assert texts_of(again).prompt_index.nunique() == 4
    assert again.tokens_per_iteration.tolist() == pytest.approx(first.tokens_per_iteration.tolist())

    # Plain logs, and a chat, whose answer is the message after the user's last one.
    said = {"completion": "apple " * 9, "category": "apples"}
    lines = [{"prompt": text, **said} for text in own.prompt.unique()]
    (tmp_path / "logs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    harness("acceptance", *QUICKEST_PAIR, f"prompts={tmp_path}/logs.jsonl", "up_to=2")
    logged = results("acceptance").iloc[-1]
    assert logged.likelihood_z < -4
    assert logged.num_texts == 4
    said = {"role": "assistant", "content": "once upon a time"}
    asked = [{"role": "user", "content": text} for text in ("The", "So")]
    chat = {"messages": [asked[0], said, asked[1], said]}
    lines = [chat, {"prompt": "no answer"}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read = [f"prompts={tmp_path}/chat.jsonl", "up_to=2", "chat_template=never"]
    outcome = harness("acceptance", *QUICKEST_PAIR, *read)
    assert results("acceptance").iloc[-1].num_texts == 2
    assert "1 prompt without an answer left out" in outcome.stderr


def test_texts_of_a_prompt_that_are_read_together_are_as_those_read_apart(
    harness: Harness, tmp_path: Path
) -> None:
    other = {"prompt": "So", "completion": "they went home"}
    answers = ("apple " * 9, "apple apple", "little girl went home and slept")
    lines = [{"prompt": "The", "completion": text} for text in answers]
    found = {}
    read = {}
    together = [*lines, other, other]
    apart = [lines[2], other, lines[0], other, lines[1]]
    for name, written in (("together", together), ("apart", apart)):
        (tmp_path / "logs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
        asked = [f"prompts={tmp_path}/logs.jsonl", "up_to=4", "T=1", "tokens=8"]
        harness("acceptance", "draft=tiny_eagle3", *asked)
        read[name] = results("acceptance").tail(1)
        rows = texts_of(read[name]).query("prompt == 'The'")
        found[name] = rows.sort_values("num_tokens").reset_index(drop=True)
    assert found["together"].num_tokens.is_unique
    for column in ("log_probability", "own_log_probability"):
        means = [rows[column].iloc[0] for rows in read.values()]
        assert means[0] == pytest.approx(means[1])
    iterations = [rows.iterations_by_num_draft_tokens.map(json.loads) for rows in found.values()]
    assert np.stack(iterations[0]) == pytest.approx(np.stack(iterations[1]), abs=1e-4)


def test_an_earlier_run_of_latency(harness: Harness) -> None:
    few = ["num_prompts=3", "num_warmup=0", "tokens=9", "decoding.ignore_eos=false"]
    harness("latency", *QUICK_MODELS, *few)
    answered = pd.read_csv(only("latency_prompts.csv")).query("arm == 'regular'")
    directory = only("latency_prompts.csv").parent
    harness("acceptance", *QUICK_MODELS, f"prompts={directory}", "up_to=8")
    assert texts().completion.tolist() == answered.completion.tolist()


def test_several_drafts_on_the_same_texts(harness: Harness, tmp_path: Path) -> None:
    """One of them is the target itself."""
    copy_shipped(tmp_path / "itself")
    drafts = f"draft=lookup,{ONE_LAYER},./itself"
    asked = ["num_prompts=2", *SHORT]
    harness("acceptance", "-m", "model=tiny_draft", drafts, "up_to=3", *asked)
    ids = [pd.read_csv(file).token_ids.tolist() for file in Path().rglob("acceptance_texts.csv")]
    assert len(ids) == 3
    assert all(ids_of_one == ids[0] for ids_of_one in ids)
    # The target accepts all of its own draft's tokens.
    rows = results("acceptance")
    itself = rows[rows.draft == "./itself"]
    assert itself.acceptance_rate.tolist() == pytest.approx([1] * 3)


def test_a_long_answer_is_read_as_far_as_it_fits(harness: Harness) -> None:
    lines = [{"prompt": f"Count {n}.", "completion": "one two three four five"} for n in range(4)]
    # More tokens than the context of 512.
    lines[2]["completion"] = "one two " * 400
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    outcome = harness("acceptance", *QUICKEST_PAIR, "prompts=./mine.jsonl", "up_to=2")
    assert "1 of 4 texts are read up to the context of 512 tokens" in outcome.stderr
    row = results("acceptance").iloc[-1]
    assert row.num_texts == 4
    read = texts()
    assert (read.context + read.num_tokens).max() == 511


def checkpoint(path: str, *lengths: float, **columns: Any) -> Run[AcceptanceRow]:
    """A run with tokens per iteration at K=1, 2 and so on."""
    shared = {"run": run_id(), "model": "13B", "draft": path, "status": "ok", "num_texts": 9}
    shared |= {"text_source": "given", "max_new_tokens": 64, "batch_size": 64, "num_tokens": 99}
    rows = [
        AcceptanceRow(
            **shared | columns,
            num_draft_tokens=k,
            tokens_per_iteration=Interval(length, length - 0.1, length + 0.1),
        )
        for k, length in enumerate(lengths, start=1)
    ]
    return Run(rows)


def with_texts(
    run: Run[AcceptanceRow], directory: Path, iterations: Sequence[int], categories: str = "a"
) -> Run[AcceptanceRow]:
    """The run with eight texts of ten tokens, and the iterations that a text takes by K."""
    rows = [
        AcceptanceTextRow(
            run=run.id, prompt_index=index, category=categories[index % len(categories)], num_tokens=10,
            token_ids=[index], iterations_by_num_draft_tokens=[*iterations],
        )
        for index in range(8)
    ]  # fmt: skip
    append_rows(directory / TEXTS_FILE, rows)
    return Run(run.rows, directory=directory)


def test_figures_that_are_not_known_are_none(tmp_path: Path) -> None:
    """Of a damaged file one text has no iterations. Another one of b takes 20: 40 ÷ (20 + 3 · 8)."""
    run = with_texts(checkpoint("a", 1.5, 2.5), tmp_path / "1", [8, 4], "ab")
    run.rows[0] = dataclasses.replace(run.rows[0], is_in_question=True)
    run.rows[-1] = dataclasses.replace(run.rows[-1], acceptance_rate=None)
    file = tmp_path / "1" / TEXTS_FILE
    damaged = file.read_text().replace('"[8, 4]"', "", 1)
    file.write_text(damaged.replace("[8, 4]", "[20, 4]", 1))
    page = acceptance_page([run])
    table = page.tables[0]
    assert isinstance(table, Table)
    assert not any(table.rows[1].cells[2:])
    assert "9 texts" in page.title
    assert [*page.why] == [("Where", "b 0.91 · a 1.25")]


def test_a_run_that_read_nothing_has_no_page() -> None:
    failed = [Run([AcceptanceRow(run=run_id(), model="13B", draft="7B", num_draft_tokens=4)])]
    assert acceptance_page(failed) is None


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
    assert "2 texts given" in outcome.stdout
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

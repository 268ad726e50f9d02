"""`audit` through the files that people have, good and bad."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.commands.audit.command import main
from harness.commands.audit.tables import read_tables
from harness.config.errors import SettingError, VerdictError
from harness.results.claims.judge import judge

ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "benchmarks" / "published"

CARD = """\
---
license: mit
---
# A head
Some | pipes in a text, and a table without claims:

| setting | value |
|---|---|
| learning rate | 1e-4 |

| method | tok/s | **speed-up** | acceptance rate | τ | K |
|---|---|---|---|---|---|
| baseline | 1,234 | 1.00× | n/a | – | |
| **EAGLE-3** | 3,196 tok/s | <span>2.59×</span> (2.4 to 2.7) | 80 % | 4.2 | 4 |

| data set | avg acceptance length | num_speculative_tokens |
|--|--|--|
| MT-bench | 2.26 (2.07 to 2.50) | 3 |
| GSM8K | 4.5 | 3 |
| code | 1.9 - 2.3 | 3 |
"""
# Of nine levels, a billion cells.
ALIASES = "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" if i else "a0: &a0 [{K: 4, AL: 2.5}]\n"
    for i in range(10)
)
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def code(*arguments: object) -> tuple[int, str]:
    """The exit code, and the line on stderr."""
    try:
        main([str(argument) for argument in arguments])
    except (SettingError, VerdictError) as error:
        return error.exit_code, str(error)
    return 0, ""


def test_every_table_with_a_claim_is_read(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, message = code(write("card.md", CARD))
    printed = capsys.readouterr().out
    assert exit_code == 1
    assert "table 3, row 2 (GSM8K, K=3): tokens per iteration 4.5" in message
    assert "2 of 3 tables" in printed
    assert "impossible" in printed
    assert "harness latency -- YOUR_SERVER_COMMAND" in printed
    # The row of the baseline gives the other its regular arm, and makes no claim of speculation itself.
    _, first, _ = read_tables(write("card.md", CARD), {}, {}).tables
    assert first[1].numbers["regular_tokens_per_second"].text == "1,234"
    assert first[0].numbers.keys() == {"tokens_per_second"}
    reasons = {one.figure: one.reason for one in judge(first)}
    assert reasons["speedup"] == "is the ratio of the tokens/s"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "K,speed-up,τ\n4,1.95×,2.50\n8,2.10×,2.90\n"),
        # The delimiter is found.
        ("a.csv", "K;speed-up;τ\n4;1,95;2,50\n8;2,10;2,90\n"),
        ("a.tsv", "K\tspeed-up\tτ\n4\t1.95\t2.50\n8\t2.10\t2.90\n"),
        (
            "a.json",
            '[{"K": 4, "speedup": 1.95, "AL": 2.50}, {"K": 8, "speedup": 2.10, "AL": 2.90}]',
        ),
        ("a.yaml", "- {K: 4, speedup: 1.95, AL: 2.50}\n- {K: 8, speedup: 2.10, AL: 2.90}\n"),
        (
            "a.txt",
            "Ours:\n\n| K | speed-up | τ |\n|-|-|-|\n| 4 | 1.95× | 2.50 |\n| 8 | 2.10 | 2.90 |\n",
        ),
    ],
)
def test_a_table_is_read_from_every_kind_of_file(write: Write, name: str, text: str) -> None:
    (rows,) = read_tables(write(name, text), {}, {}).tables
    figures = [
        [
            round(row.numbers[name].low, 4)
            for name in ("num_draft_tokens", "speedup", "tokens_per_iteration")
        ]
        for row in rows
    ]
    # 2.50 keeps its second decimal.
    assert figures == [[4, 1.945, 2.495], [8, 2.095, 2.895]]


def test_lengths_by_k_are_a_curve(write: Write) -> None:
    path = write(
        "golden.yaml", "a_mtp:\n  thinking_on: {1: 1.79, 2: 2.27}\n  thinking_off: {1: 1.92}\n"
    )
    (rows,) = read_tables(path, {}, {"num_prompts": "80"}).tables
    names = [(row.settings["name"], row.numbers["num_draft_tokens"].text) for row in rows]
    assert names == [
        ("a_mtp thinking_on", "1"),
        ("a_mtp thinking_on", "2"),
        ("a_mtp thinking_off", "1"),
    ]
    assert {row.numbers["num_prompts"].text for row in rows} == {"80"}


def test_columns_may_be_named(write: Write) -> None:
    path = write("a.csv", "case,avg,n_d\nx,5.5,4\n")
    assert code(path)[0] == 2
    exit_code, message = code(path, "columns={avg: tokens_per_iteration, n_d: num_draft_tokens}")
    assert (exit_code, "row 1 (x, K=4)" in message) == (1, True)


def test_exit_codes(write: Write) -> None:
    assert code(write("a.csv", "K,AL\n4,2.5\n")) == (0, "")
    assert code(write("a.csv", "K,AL\n4,5.5\n"))[0] == 1
    assert code(write("a.csv", "tok/s,baseline tok/s,speedup\n365,187,2.40\n"))[0] == 3
    exit_code, message = code(write("a.csv", "draft,speedup\nx,2.5\n"))
    assert (exit_code, message) == (3, "nothing could be checked: the table states too little")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "", "has no table"),
        ("a.md", "", "has no table"),
        ("a.md", "only text\n", "Markdown tables are read"),
        ("a.yaml", "a: [1", "is no .yaml file"),
        ("a.json", "{]", "is no .json file"),
        ("a.csv", "model,score\nx,1\n", "that is known: model, score"),
        ("a.csv", "K,AL\n4,2.5\n5,2.6,7\n", "row 2 has not as many cells"),
        ("a.csv", "K,AL\n4\n", "row 1 has not as many cells"),
        ("a.csv", "K,speed-up\n", "a heading and no rows"),
        ("a.md", "| K | AL |\n|---|---|\n", "a heading and no rows"),
        ("a.html", "<table><tr><td>4</td></tr></table>", "an HTML table, which is not read"),
        (
            "a.csv",
            "my results, of May\nK,AL,x\n4,2.5,1\n",
            "the heading, its first line: my results",
        ),
        ("a.yaml", ALIASES, "aliases (*name) are not read"),
        ("a.jsonl", "{]\n", "is no .jsonl file"),
    ],
)
def test_a_bad_table_ends_in_one_line(write: Write, name: str, text: str, said: str) -> None:
    exit_code, message = code(write(name, text))
    assert exit_code == 2
    assert said in message
    assert len(message.splitlines()) == 1


def test_a_bad_argument_ends_in_one_line(tmp_path: Path, write: Write) -> None:
    table = write("a.csv", "K,AL\n4,2.5\n")
    binary = tmp_path / "b.csv"
    binary.write_bytes(bytes(range(128, 256)))
    for arguments, said in (
        ([], "takes one file with a table, not 0"),
        ([table, table], "takes one file with a table, not 2"),
        ([tmp_path / "none.csv"], "No such file"),
        ([tmp_path], "directory"),
        ([binary], "is no text"),
        ([table, "num_prompt=3"], "did you mean num_prompts?"),
        ([table, "detail=true"], "did you mean details?"),
        ([table, "details=yes"], "must be true or false"),
        ([table, "columns={AL}"], "must be {HEADING: NAME, ...}"),
        ([table, "num_prompts=many"], "num_prompts: must be a number"),
        ([table, "columns={AL"], "must be {HEADING: NAME, ...}"),
        ([table, "columns={LA: speedup}"], "no table has this column (did you mean AL?)"),
        ([table, "columns={AL: speed_up}"], "did you mean speedup?"),
    ):
        exit_code, message = code(*arguments)
        assert (exit_code, said in message) == (2, True), (arguments, message)
        assert len(message.splitlines()) == 1


def test_counts_of_accepted_tokens_are_no_k_and_prompts_no_output(write: Write) -> None:
    text = "K,AL,accepted draft tokens,total tok/s\n4,2.84,1.8,9000\n"
    (rows,) = read_tables(write("a.csv", text), {}, {}).tables
    assert rows[0].numbers["num_draft_tokens"].text == "4"
    assert "draft" not in rows[0].settings
    (rows,) = read_tables(
        write("b.csv", text.removeprefix("K,").replace("\n4,", "\n")), {}, {}
    ).tables
    assert rows[0].numbers.keys() == {"tokens_per_iteration"}


def test_a_result_file_of_ours_is_read(write: Write) -> None:
    record = {
        "run": "a",
        "tokens_per_iteration": 2.0345678901,
        "settings": {"engine.chat": "false"},
    }
    record["speedup"] = {"estimate": 1.0138222753, "low": 0.93, "high": 1.0931065288, "covers": ""}
    content = {"version": 1, "verdict": {"conclusion": "cannot tell"}, "rows": [record]}
    (rows,) = read_tables(write("result.json", json.dumps(content)), {}, {}).tables
    assert len(rows) == 1
    assert rows[0].numbers["speedup"].text == "1.014 (0.93 to 1.093)"
    assert rows[0].numbers["speedup"].interval == pytest.approx((0.93, 1.0931), abs=0.01)


def test_the_arms_of_a_ratio_have_the_same_batch_size(write: Write) -> None:
    text = "method,batch size,tok/s,speedup\nbaseline,1,100,1\nheads,1,200,2.0\nheads,32,1500,1.1\n"
    (rows,) = read_tables(write("a.csv", text), {}, {}).tables
    assert "regular_tokens_per_second" in rows[1].numbers
    assert "regular_tokens_per_second" not in rows[2].numbers


def test_rows_that_differ_in_an_unknown_column_are_no_curve(write: Write) -> None:
    text = "model,step,K,AL,n\nx,1,2,2.0,80\nx,1,4,2.5,80\nx,9,2,2.9,80\n"
    assert code(write("a.csv", text)) == (0, "")


def test_commands_repeat_what_is_stated(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(
        "a.csv",
        "model,draft,K,temperature,data set,num prompts,GPU,speedup,AL\n"
        "Qwen/Qwen3-8B,z-lab/x,4,0,gsm8k,80,H200,1.9,2.5\n"
        "Qwen/Qwen3-8B,z-lab/x,8,0,gsm8k,80,H200,2.1,2.9\n",
    )
    assert code(table, "details=true")[0] == 0
    printed = " ".join(capsys.readouterr().out.split())
    command = "harness latency -m model=Qwen/Qwen3-8B draft=z-lab/x prompts=gsm8k num_prompts=80 temperature=0 K=4,8"
    assert command in printed
    assert "on H200; left open: tokens, batch_size" in printed
    # Without a claim about time, one pass over the texts has every K.
    assert code(write("a.yaml", "m: {1: 1.79, 2: 2.27}\n"), "draft=x")[0] == 0
    assert "harness acceptance model=YOUR_MODEL draft=YOUR_DRAFT up_to=2" in capsys.readouterr().out


def test_published_curves_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    """Of eleven curves of chains, by 80 prompts."""
    stated = ("num_prompts=80", "max_new_tokens=4096")
    exit_code, _ = code(PUBLISHED / "inferencex_golden_lengths.yaml", *stated)
    printed = " ".join(capsys.readouterr().out.split())
    assert exit_code == 3
    assert "104 claims: 4 unlikely, 100 consistent" in printed
    assert (
        "dsv4_mtp thinking_off, K=7): tokens per iteration 3.00 is at least 0.15 below 3.16"
        in printed
    )


def test_a_speedup_of_other_engines_is_not_of_speculation() -> None:
    (rows,) = read_tables(PUBLISHED / "gpustack_qwen3_8b.md", {}, {}).tables
    judged = judge(rows)
    assert {one.verdict for one in judged} == {"not stated"}
    assert "engine (vLLM, SGLang)" in judged[0].reason

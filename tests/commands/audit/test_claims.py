"""`audit` reads what others print by columns that are known or named, and names what it does not read."""

from __future__ import annotations

import pytest

from harness.commands.audit.rows import AuditRow
from harness.commands.audit.tables import AuditedText, read_text
from harness.config.errors import SettingError

ARMS = "| quant | mode | tk/s |\n|---|---|---|\n"
REGULAR = "regular_tokens_per_second"


def read(text: str, columns: dict[str, str] | None = None, title: str = "a.csv") -> AuditedText:
    return read_text(text, columns or {}, AuditRow(""), title)


def figures_of(row: AuditRow) -> dict[str, str]:
    return {name: figure.text for name, figure in row.figures.items()}


@pytest.mark.parametrize(
    "text",
    [
        "K,speed-up,τ\n4,1.95×,2.50\n8,2.10×,2.90\n",
        "K;speed-up;τ\n4;1,95;2,50\n8;2,10;2,90\n",
        "K\tspeed-up over AR\tτ\n4\t1.95\t2.50\n8\t2.10\t2.90\n",
        "K  speed-up  τ\n-  --------  ----\n4  1.95x     2.50\n8  2.10x     2.90\n",
        "# my results\nK,speed-up,τ\n4,1.95×,2.50\n8,2.10×,2.90\n",
        "Ours:\n\n| K | speed-up | τ |\n|-|-|-|\n| 4 | <b>1.95×</b> | **2.50** |\n| 8 | 2.10 | 2.90 |\nand text\n",
        "K | speed-up | τ\n-- | -- | --\n4 | 1.95× | 2.50\n8 | 2.10 | 2.90\n",
        "> | K | speed-up | τ |\n> |---|---|---|\n> | 4 | 1.95× | 2.50 |\n> | 8 | 2.10 | 2.90 |\n",
    ],
)
def test_a_table_is_read_in_every_form(text: str) -> None:
    (rows,) = read(text).tables
    names = ("num_draft_tokens", "speedup", "tokens_per_iteration")
    figures = [[round(row.figures[name].low, 4) for name in names] for row in rows]
    # 2.50 keeps its second decimal.
    assert figures == [[4, 1.945, 2.495], [8, 2.095, 2.895]]


@pytest.mark.parametrize(
    ("heading", "name"),
    [
        ("tk/s", "tokens_per_second"),
        ("spec_avg_pred_t/s", "tokens_per_second"),
        ("plain t/s", "regular_tokens_per_second"),
        ("tok/s without MTP", "regular_tokens_per_second"),
        ("tok/s/user", "user_tokens_per_second"),
        ("TPOT (ms)", "ms_per_token"),
        ("Latency (ms/token)", "ms_per_token"),
        ("--spec-draft-n-max", "num_draft_tokens"),
        ("block", "num_draft_tokens"),
        ("accept", "acceptance_rate"),
        ("Draft Tokens Accepted", "acceptance_rate"),
        ("in flight", "batch_size"),
        ("tokens/step", "tokens_per_iteration"),
        ("emitted per verify", "tokens_per_iteration"),
        ("tok/s mean", "tokens_per_second"),
        ("w/ Spec. (tok/s)", "tokens_per_second"),
        ("w/o Spec. (tok/s)", "regular_tokens_per_second"),
        ("length (accepted, mean)†", "tokens_per_iteration"),
        ("K (draft tokens)", "num_draft_tokens"),
        ("users", "batch_size"),
        ("accept-len", "tokens_per_iteration"),
        ("baseline_tok_s", "regular_tokens_per_second"),
        ("proposed per iteration", "mean_num_draft_tokens"),
        # Of another meaning, or of none that is known.
        *((heading, None) for heading in (
            "prompt t/s", "total tok/s", "req/s", "8 concurrent", "GPU Alloc @ 40K", "wall tokens", "Drafts", "run",
            "n", "steps", "ITL", "baseline accept rate", "TTFT", "PPL ratio", "draft cost", "MT-bench speed",
            "Speedup (%)", "vs baseline", "draft tok/s", "target backend", "tok/J dec", "Δ latency",
        )),
    ],
)  # fmt: skip
def test_headings_of_threads(heading: str, name: str | None) -> None:
    cell = "4" if name in ("batch_size", "num_draft_tokens") else "0.5"
    reading = read(f"| mode | {heading} | speedup |\n|---|---|---|\n| MTP | {cell} | 1.2x |")
    assert reading.tables[0][0].figures.keys() - {"speedup"} == ({name} if name else set())
    # What was read stands before what was not, with the argument that would read it.
    assert (f"{heading} → {name}" in reading.notes[0]) == bool(name)
    unread = f'not read: {heading} (\'columns={{"{heading}": "NAME"}}\' reads one)'
    assert reading.notes[1:] == ([] if name else [unread])
    if not name:
        named = read(f"mode,{heading},speedup\nMTP,0.5,1.2x\n", {heading: "acceptance_rate"})
        assert figures_of(named.tables[0][0])["acceptance_rate"] == "0.5"


@pytest.mark.parametrize("words", [
    "no speculation", "n/a - no mtp", "plain", "off", "none", "w/o", "vanilla", "AR", "baseline", "MTP off", "N/A",
    "without speculation", "baseline (greedy)", "no MTP", "plain decoding", "autoregressive", "Baseline 8B",
    "TP8 baseline", "stock", "Qwen no-spec",
])  # fmt: skip
def test_the_baseline_is_known_by_its_words(words: str) -> None:
    text = f"| quant | mode | tk/s |\n|---|---|---|\n| Q4 | {words} | 40 |\n| Q4 | MTP n=3 | 60 |"
    (rows,) = read(text).tables
    assert figures_of(rows[0]) == {
        REGULAR: "40",
        "tokens_per_second": "60",
        "num_draft_tokens": "3",
    }
    # In a column of K, too.
    (rows,) = read(f"K,tok/s\n{words},40\n3,60\n").tables
    assert figures_of(rows[0])[REGULAR] == "40"


@pytest.mark.parametrize(
    "words", ["arm", "MTP vs baseline", "normal", "novel", "nowhere", "offload", "auto", "noise"]
)
def test_other_words_are_no_baseline(words: str) -> None:
    (rows,) = read(
        f"| mode | tk/s | gain |\n|---|---|---|\n| {words} | 40 | |\n| MTP | 60 | 1.1x |"
    ).tables
    assert REGULAR not in rows[1].figures


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        (f"{ARMS}| | baseline | 40 |\n| Q4 | MTP n=3 | 60 |", {REGULAR: "40", "num_draft_tokens": "3"}),
        (f"{ARMS}| Q4 | baseline | 40 |\n| Q4 | MTP | 60 |", {REGULAR: "40"}),
        ("mode,tk/s,tau\nblock 4,60,2\n", {"num_draft_tokens": "4", "tokens_per_iteration": "2"}),
        ("mode,tk/s,tau\ntop-k=5,60,2\n", {"tokens_per_iteration": "2"}),
        ("mode,tk/s,tau\nK=5 / K=3,60,2\n", {"tokens_per_iteration": "2"}),
        # A baseline that accepts drafts is no regular arm.
        ("mode,tk/s,tau\nbaseline (old head),40,1.8\nhead,60,2\n", {"tokens_per_iteration": "2"}),
        ("mode,tk/s,tau\nMTP=3,60,2\n", {"num_draft_tokens": "3", "tokens_per_iteration": "2"}),
        # A length beside rates in percent, and a draft that is a count.
        ("mode,tk/s,accept\nMTP,60,74%\nEAGLE,60,3.1\n", {"tokens_per_second": "60"}),
        ("model,draft,tk/s,tau\n7B,289,60,2\n", {"tokens_per_iteration": "2"}),
        ("draft model,tk/s,tau\nN/A,30,\n0.5B,60,2\n", {REGULAR: "30", "tokens_per_iteration": "2"}),
        # Counts are no K.
        ('mode,draft tokens,tau\nMTP,"61,896",2\n', {"tokens_per_iteration": "2"}),
        ("mode,K,γ,tau\nEAGLE,16,4,2\n", {"num_draft_tokens": "4", "tokens_per_iteration": "2"}),
        # SGLang's depth, and its nodes with the root.
        (
            "batch,steps,topk,num_draft_tokens,AL\n1,3,2,8,2.1\n",
            {"batch_size": "1", "num_draft_tokens": "3", "topk": "2", "num_nodes": "8", "tokens_per_iteration": "2.1"},
        ),
        # The second column of one heading has another one.
        ("mode,tk/s,tk/s,tau\nMTP,60,70,2\n", {"tokens_per_second": "60", "tokens_per_iteration": "2"}),
    ],
)  # fmt: skip
def test_what_the_last_row_states(text: str, figures: dict[str, str]) -> None:
    usual = {"tokens_per_second": "60"}
    assert usual | figures_of(read(text).tables[0][-1]) == usual | figures


@pytest.mark.parametrize(
    "text",
    [
        f"{ARMS}| Q3 | baseline | 40 |\n| Q4 | MTP | 60 |",
        f"{ARMS}| | none | 40 |\n| Q3 | none | 41 |\n| Q4 | MTP | 60 |",
        f"{ARMS}| Q4 | none | 40 |\n| Q4 | none | 41 |\n| Q4 | MTP | 60 |",
        "method,batch size,tok/s\nbaseline,1,100\nheads,32,1500\n",
    ],
)
def test_arms_of_other_circumstances_are_not_compared(text: str) -> None:
    with pytest.raises(SettingError, match="speed of both arms"):
        read(text)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ("80 90 73.2", [0.8, 0.9, 0.732]),
        ("120% 80%", [1.2, 0.8]),
        ("1 0.5", [1, 0.5]),
        ("3 20.5", [0.03, 0.205]),
        # A length, a share or percent.
        *((cells, []) for cells in ("3.2 3.9", "1.2", "0.8 30", "0.5 30 40", "3 20", "0.8 1.2 0.9", "158 220")),
    ],
)  # fmt: skip
def test_a_rate_is_a_share_or_in_percent_by_its_column(cells: str, expected: list[float]) -> None:
    lines = "\n".join(f"x,{cell},1.5" for cell in cells.split())
    reading = read(f"case,acceptance rate,AL\n{lines}\n")
    rates = [row.figures["acceptance_rate"].middle for row in reading.tables[0] if expected]
    assert rates == pytest.approx(expected, abs=0.001)
    unread = 'not read: acceptance rate (\'columns={"acceptance rate": "NAME"}\' reads one)'
    assert (unread in reading.notes) == (not expected)


@pytest.mark.parametrize(
    "cell",
    ["up to 2.1x", ">2x", "1.2k", "failed", r"$2.1\times$", "1e99999999999", "45%", "0x"],
)
def test_an_odd_cell_leaves_its_claim_out_and_is_named(cell: str) -> None:
    reading = read(f"K,AL,speedup\n4,2.5,1.9x\n4,2.6,{cell}\n")
    (rows,) = reading.tables
    assert [row.figures.keys() >= {"speedup"} for row in rows] == [True, False]
    assert "tokens_per_iteration" in rows[1].figures
    assert reading.notes[1:] == [f"no speedup that is read: {cell}"]

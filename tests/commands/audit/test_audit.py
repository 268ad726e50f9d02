"""`audit` through the files that people have and what they type, good and bad."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.commands.audit.command import main
from harness.config.command_line import Words
from harness.config.errors import SettingError, VerdictError

Audit = Callable[..., tuple[int, str]]


class Pasted(io.TextIOWrapper):
    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))


@pytest.fixture
def audit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Audit:
    """What `audit` prints of pasted text, or of arguments alone, on one line; with its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, pasted: str | bytes = "") -> tuple[int, str]:
        if pasted:
            text = pasted if isinstance(pasted, bytes) else pasted.encode()
            monkeypatch.setattr(sys, "stdin", Pasted(text))
        code, message = 0, ""
        try:
            main(Words([*arguments, *(["-"] if pasted else [])]))
        except (SettingError, VerdictError) as error:
            code, message = error.exit_code, str(error)
            assert len(message.splitlines()) == 1
        return code, " ".join(f"{capsys.readouterr().out} {message}".split())

    return run


DFLASH = "mode,K,tok/s,acceptance\nbaseline,0,74.72,\nDFlash,15,194.80,85.16%\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Yields, costs, speed-up, what holds it back, with all accepted.
        ("mode,K,AL,tk/s\nplain,,,50\nMTP,8,1.80,75.0\n", "1.80 1.20 1.50× acceptance 7.50×"),
        ("mode,K,t/s,AL\nnone,,14.5,\nMTP,1,11.1,1.56\n", "MTP 1 1.56 2.04 0.77× cost, even with all accepted 0.98×"),
        ("n-max,tok/s,AL\n0,14.20,\n2,38.30,2.51\n", "2.51 0.93 2.70× less than one step"),
        ("n-max,tok/s,AL\n0,14.20,\n2,38.30,2.70\n", "2.70 1.00 2.70× almost free, or computed 3.00×"),
        ("n-max,tok/s,AL\n0,14.20,\n2,8.30,1.01\n", "1.01 1.73 0.58× almost nothing is accepted 1.74×"),
        # A user's gain, not the server's.
        (
            "mode,in flight,tok/s per user,tok/s,AL\nplain,8,50.0,400,\nMTP,8,150.0,600,3.30\n",
            "MTP 8 3.30 1.10 3.00× 1.50× by tokens/s",
        ),
        # Of n-grams, trees and fewer drafts than K, nobody knows what a rate gives.
        ("n_max,p_min,tok/s,accept\n0,,20,\n8,0.75,40,84%\n", "row 2 8 84% 2.00× (1.93 to 2.08) Next with"),
        ("draft,K,AL,TPS\nnone,,,10.0\nngram,8,1.80,15.0\n", "ngram 8 1.80 1.20 1.50× Next"),
        # A share of 15 draft tokens, or of all tokens: 1 ÷ (1 - 0.8516).
        (DFLASH, "85.16% of emitted 6.74 2.58 2.61× acceptance 6.19×"),
        (DFLASH, "85.16% of proposed 13.77 5.28 2.61× cost 3.03×"),
        # 41.0 / 24.6 s.
        ("config,K,AL,latency (s),vs baseline\nbase,0,,41.0,—\nMTP,3,2.86,24.6,-40 %\n", "2.86 1.72 1.67× a"),
        # Two arms that draft: no regular speed is stated.
        ("c,A tok/s,B tok/s,delta,AL\n1,881,914,-3.6%,4.7\n", "audit baseline=NUMBER speed=NUMBER length=4.7 K=N"),
        # A list of both runs: that without drafts is the regular arm.
        (
            '[{"mean_tpot_ms": 20.00}, {"mean_tpot_ms": 10.00, "accept_length": 2.50}]',
            "row 2 2.50 1.25 2.00×",
        ),
    ],
)  # fmt: skip
def test_costs(audit: Audit, text: str, expected: str) -> None:
    _, printed = audit(pasted=text)
    assert expected in printed


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("speedup=5.9 K=3", 1, "speed-up 5.9 is above 4: K=3 draft tokens and the target's own"),
        ("speedup=2.4 K=4", 0, "audit baseline=NUMBER speed=NUMBER acceptance=NUMBER K=4"),
        ("speedup=2.40 length=2.60 K=4", 0, "2.60 1.08 2.40× acceptance 4.62×"),
        ("speedup=2.0 K=3 acceptance=0.70", 0, "0.70 of proposed 3.10 1.55 (1.50 to 1.60) 2.00× (1.95"),
        ("length=6.2 k=4", 1, "tokens per iteration 6.2 is above 5"),
        ("length=0.56 K=1", 3, "is below 1: it leaves out the target's own token"),
        ("baseline=22.7 speed=40.6 acceptance=73.9% K=3", 0, "3.22 1.80 1.79×"),
        ("baseline=18.05 speed=29.66 K=5", 0, "harness audit baseline=18.05 speed=29.66 acceptance=NUMBER K=5"),
        ("speedup=+34% length=1.90", 0, "1.90 1.42 1.34×"),
        # Nothing was checked, with an acceptance or without.
        ("baseline=38 speed=33.93", 3, "0.89×"),
        ("baseline=38 speed=33.93 acceptance=60%", 3, "0.89×"),
        # The ratio of what is printed, and what rounding leaves open.
        ("baseline=1 speed=2", 3, "2.00× (1.00 to 5.00)"),
        ("baseline=2 speed=3 K=4 length=3.00", 0, "2.00 (1.28 to 3.00) 1.50× (1.00 to 2.33)"),
        # Units, and commas by their digits.
        ("baseline=55.47ms speed=33.99ms length=2.3", 0, "2.30 (2.25 to 2.35) 1.41 (1.38 to 1.44) 1.63×"),
        ("baseline=41s speed=24.6s", 3, "1.67×"),
        ("baseline=22,7 speed=40,6 length=3,22", 0, "3.22 1.80 1.79×"),
        ("baseline=211.2 speed=1,022.9 length=5.9 K=7", 0, "5.90 1.22 4.84×"),
        ("baseline=211.2 speed=1,022 length=5.9", 2, "speed=1,022: may be 1022 or 1.022: write it without the comma"),
        # A name that is typed again is the next row's; one value holds for all rows.
        ("baseline=22.7 speed=40.6 baseline=88.9 speed=116.8 length=3.22", 0, "row 2 3.22 2.45 1.31×"),
        ("baseline=130 speed=161 acceptance=74% K=3 speed=118 acceptance=52% K=4", 0, "row 2 4 52% of proposed 3.08"),
        ("baseline=95 speed=600 K=4 acceptance=0.55", 1, "speed-up 6.32× by tokens/s is above 5: K=4 draft tokens"),
        # An impossible rate yields no tokens, which no other figure could be held against.
        ("baseline=20 speed=30 K=2 acceptance=180%", 1, "2 figures, 1 consistent, 1 impossible"),
        ("length=4.2 K=3 speed=50 baseline=20", 3, "2.50× (2.41 to 2.59)"),
        ("baseline=200 speed=1.5 length=3", 3, "means that an iteration costs 322 regular steps"),
        ("acceptance=0 K=3 baseline=20 speed=15", 0, "1.00 1.33"),
        ("acceptance=0", 3, "Next why, as docs/low-acceptance.md says harness acceptance"),
        ("acceptance=15% K=4 baseline=20 speed=15", 0, "Next why, as docs/low-acceptance.md says harness acceptance"),
        ("acceptance=0 K=3 baseline=20 speed=15", 0, "almost no"),
        ("speedup=+0% length=2 K=3 baseline=20", 0, "1.00×"),
        ("speedup=-150% length=2 K=3 baseline=20", 2, "loses all, or more"),
        # Of 4 proposed tokens 2.60, of emitted 1.67: nothing takes less than a step.
        ("speedup=5 K=4 acceptance=0.4", 3, "is above the 2.60 (2.40 to 2.80) tokens per iteration, in no less"),
    ],
)  # fmt: skip
def test_bare_figures(audit: Audit, arguments: str, code: int, expected: str) -> None:
    found, printed = audit(*arguments.split())
    assert (found, expected in printed) == (code, True), printed
    assert "nan" not in printed


def test_result_files_are_read_by_their_keys(audit: Audit, tmp_path: Path) -> None:
    """A planted pair: 2.65 tokens per iteration of 1.26 steps, 2.10 times as fast."""
    served = {"total_token_throughput": 109.5, "output_throughput": 83.6}
    drafts = {"spec_decode_num_drafts": 7698, "spec_decode_draft_tokens": 23094}
    rates = {"spec_decode_acceptance_length": 2.65, "spec_decode_acceptance_rate": 55.0}
    vllm = {**served, "mean_tpot_ms": 11.96, **drafts, **rates}
    plain = {**served, "mean_tpot_ms": 25.12, "output_throughput": 39.8}
    sglang = {**served, "total_output_tokens_retokenized": 1, "mean_tpot_ms": 11.96}
    sglang["accept_length"] = 2.65
    aiperf = {
        "aiperf_version": "0.5.0",
        "inter_token_latency": {"unit": "ms", "avg": 11.96},
        "spec_decode_acceptance_length": {"unit": "tokens", "avg": 2.65},
    }
    metrics = {
        "inter_token_latency_ms": {"successful": {"mean": 11.96}},
        "output_tokens_per_second": {"successful": {"mean": 83.6}},
    }
    guidellm = {"benchmarks": [{"metrics": metrics}]}
    Path("plain.json").write_text(json.dumps(plain))
    files = {"vllm": vllm, "sglang": sglang, "aiperf": aiperf, "guidellm": guidellm}
    for name, content in files.items():
        Path(f"{name}.json").write_text(json.dumps(content))
        arguments = ["length=2.65"] if name == "guidellm" else []
        _, printed = audit(f"{name}.json", "baseline=plain.json", *arguments)
        assert "2.65 1.26 2.10×" in printed, name
    _, printed = audit("vllm.json", "baseline=39.8")
    assert "row 1 3 55.000 2.65 1.26 2.10× acceptance 3.17×" in printed
    # 2.598 draft tokens an iteration, which are no K.
    Path("fewer.json").write_text(json.dumps(vllm | {"spec_decode_draft_tokens": 20000}))
    assert "row 1 55.000 2.65 1.26 2.10×" in audit("fewer.json", "baseline=39.8")[1]
    # Both runs in one file.
    Path("both.json").write_text(json.dumps([plain, vllm]))
    assert "row 2 3 55.000 2.65 1.26" in audit("both.json")[1]
    # SGLang appends a line for each run.
    Path("runs.jsonl").write_text(f"{json.dumps(sglang)}\n{json.dumps(sglang)}\n")
    code, printed = audit("runs.jsonl", "baseline=39.8")
    assert (code, "runs.jsonl · 2 rows with" in printed) == (0, True)
    assert audit("vllm.json", "baseline=vllm.json")[0] == 2
    # A sweep is compared with the run of the same load.
    for name, run in (("sweep", vllm), ("regular", plain)):
        loads = [run | {"max_concurrency": load} for load in (1, 8) if load == 8 or run is vllm]
        Path(f"{name}.json").write_text(json.dumps(loads))
    _, printed = audit("sweep.json", "baseline=regular.json")
    assert "row 2 3 8 55.000 2.65 1.26 2.10×" in printed
    assert "row 1 3 1 55.000 2.65 row 2" in printed
    assert (
        "row 1 and regular row 2 differ in batch_size unknown and 8"
        in audit("vllm.json", "baseline=regular.json")[1]
    )


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model_id", "org/B-7B", "model org/A-8B and org/B-7B"),
        ("dataset_name", "random", "prompts sharegpt and random"),
        ("total_output_tokens", 24000, "output_tokens 150.00 and 300.00"),
        ("total_input_tokens", 12000, "input_tokens 75.000 and 150.00"),
        ("max_concurrency", 8, "batch_size 1 and 8"),
    ],
)
def test_files_of_other_runs_are_no_two_arms(
    audit: Audit, tmp_path: Path, key: str, value: object, named: str
) -> None:
    runs = {"completed": 80, "total_input_tokens": 6000, "total_output_tokens": 12000}
    runs |= {"model_id": "org/A-8B", "dataset_name": "sharegpt", "max_concurrency": 1}
    Path("with.json").write_text(json.dumps(runs | {"mean_tpot_ms": 8.0, "accept_length": 2.0}))
    for other, expected in (
        (runs, "2.00 1.43 1.40×"),
        ({key: value}, named),
    ):
        Path("without.json").write_text(json.dumps(runs | {"mean_tpot_ms": 11.2} | other))
        assert expected in audit("with.json", "baseline=without.json")[1]


FORMS = ("table.md", "baseline=without.json", "baseline=22.7 speed=40.6 acceptance=73.9% K=3")


@pytest.mark.parametrize(
    "text",
    [
        "Our draft is 3.0x faster, with an acceptance rate of 70.0% at 4 draft tokens.",
        "Without SD: 2.2 t/s.\nWith SD: 3.5 t/s.\n",
        "slot print_timing:\n       eval time = 2020.00 ms / 101 tokens (   20.00 ms per token,    50 tokens/s)\n",
        '[{"K": 4, "speedup": 1.95}]',
        '{"a": ' * 5000,
        "a" * 300,
    ],
)
def test_other_texts_are_refused_in_one_line_that_shows_what_is_read(
    audit: Audit, text: str
) -> None:
    for arguments, pasted in (([], text), ([text], "")):
        code, message = audit(*arguments, pasted=pasted)
        assert code == 2
        assert all(form in message for form in FORMS), message
        assert len(message) < 500


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model,score\nx,1\n", "no acceptance, length, speed-up or speed of both arms"),
        ("Metric,MTP 1,MTP 8,Δ\nAccept length,1.84,4.40,+139.1%\n", "no column; not read: Metric, MTP 1, MTP 8, Δ ("),
        # The line to type, with what is known of a row.
        ("Model,n_max,Decode\nA,2,22.7 → 40.6 (+79%)\n", "audit baseline=NUMBER speed=NUMBER acceptance=NUMBER K=2"),
        ("Model,Baseline,MTP\nA,130.9 t/s,161.2 t/s @ 73.9%\n", "audit baseline=130.9 speed=NUMBER acceptance=N"),
        ("cell,TPOT\ndspark,9.48\noff,25.8\n", "audit regular_ms_per_token=NUMBER ms_per_token=9.48 acc"),
        ("cell,TPOT\ndspark,9.48\noff,25.8\n", "no row is the regular arm (baseline, none, K=0); regular=CELL"),
        ("K,AL\n4,2.5\n5,2.6,7\n", "no table that is read"),
        ("| K | AL |\n|---|---|\n", "no table that is read"),
        ("<table><tr><td>4</td></tr></table>", "no table that is read"),
        ("| M | GSM8K | | code | |\n|---|---|---|---|---|\n| | tok/s | τ | tok/s | τ |", "not read: M, GSM8K, code"),
    ],
)  # fmt: skip
def test_a_bad_table_ends_in_one_line(audit: Audit, text: str, expected: str) -> None:
    Path("a.csv").write_text(text, encoding="utf-8")
    code, message = audit("a.csv")
    assert (code, expected in message) == (2, True), message


def test_a_bad_argument_ends_in_one_line(audit: Audit) -> None:
    Path("a.csv").write_text("K,AL\n4,2.5\n")
    Path("b.csv").write_bytes("K,AL\n4,2.5\n".encode("utf-16"))
    for arguments, expected in (
        ([], "takes one file with one value of each NAME, or figures"),
        (["none.csv"], "No such file"),
        ([""], "directory"),
        (["b.csv"], "is no text in UTF-8"),
        (["a.csv", "bach_size=3"], "did you mean batch_size?"),
        (["a.csv", "batch_size=many"], "batch_size=many: is no such number; write 40.6, 24.6ms"),
        (["K=-1", "speedup=2"], "K=-1: is no such number"),
        (
            ["acceptance=72", "speedup=2"],
            "acceptance=72: is no share: write 72% if it is in percent",
        ),
        (
            ["speedup=2,3,4"],
            "speedup=2,3,4: is no such number; write 40.6, 24.6ms, 73.9%, 1.79x or +79%, and type a name again",
        ),
        (
            ["speedup=2", "K=3", "speedup=3", "K=4", "K=5"],
            "speedup=2 and 3: must have one value, or one for each of 3 rows",
        ),
        (["speedup=34%"], "speedup=34%: may be a part: write +34% for a gain"),
        (["a.csv", "K=3", "K=4"], "takes one file with one value of each NAME"),
        (["a.csv", "columns={AL"], "must be {HEADING: NAME, ...}"),
        (["a.csv", "columns={AL}"], "no such NAME"),
        (["a.csv", "columns={LA: speedup}"], "no table has this column (did you mean AL?)"),
        (["a.csv", "columns={AL: speed_up}"], "did you mean speedup?"),
        (
            ["a.csv", "columns={AL: acceptance}"],
            "AL is 2.5, which is no share: write 2.5% if it is in percent",
        ),
        (["a.csv", "baseline=none.json"], "No such file"),
        (["a.csv", "regular=of"], "no table has this cell"),
        (["regular=off", "K=4"], "takes one file"),
    ):
        code, message = audit(*arguments)
        assert (code, expected in message) == (2, True), (arguments, message)
    assert "is no text in UTF-8" in audit(pasted="K,AL\n4,2.5\n".encode("utf-16"))[1]


def test_exit_codes(audit: Audit) -> None:
    assert audit(pasted="K,AL\n4,2.5\n")[0] == 0
    assert audit(pasted="K,AL\n4,5.5\n")[0] == 1
    assert audit(pasted="tok/s,baseline tok/s,speedup\n365,187,2.70\n")[0] == 3
    code, printed = audit("columns={speedup: speedup}", pasted="draft,speedup\nx,2.5\n")
    assert (code, "nothing could be checked" in printed) == (3, True)
    # What cannot be heads no page.
    code, printed = audit(pasted="K,AL,tok/s\n0,,10\n4,6.2,20\n")
    assert (code, "steps" in printed) == (1, False)

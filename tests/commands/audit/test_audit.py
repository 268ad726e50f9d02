"""`audit` through the files that people have and what they type, good and bad."""

from __future__ import annotations

import io
import json
import random
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mode,K,AL,tk/s\nplain,,,50\nMTP,8,1.80,75.0\n", "Its acceptance holds it back more: with all accepted 7.50×"),
        # A length without the target's own token, as its rate shows: two tokens at most.
        (
            "mode,K,t/s,acceptance rate,mean accepted len\nnone,,14.5,,\nMTP,1,11.1,55.6%,0.56\n",
            "K=1): 1.56 tokens per iteration of 2.04 steps, 0.77×: slower even with all accepted (0.98×)",
        ),
        ("n-max,tok/s,accept rate\n0,14.20,\n2,38.30,75.8%\n", "less than one step, so more than speculation differs"),
        # A user's gain, not the server's.
        (
            "mode,in flight,tok/s per user,accept len\nno speculation,8,50.0,\nDSpark,8,100.0,3.00\n",
            "3.00 tokens per iteration of 1.50 steps, 2.00×",
        ),
        # Of a tree at most its depth and one.
        (
            "mode,steps,topk,num_draft_tokens,tok/s,acc len\nplain,0,0,0,100,1\nEAGLE,7,10,64,88.0,3.03\n",
            "of 3.44 steps, 0.88×. Its acceptance holds it back more: with all accepted 2.32×",
        ),
        ("n_max,p_min,tok/s,accept\n0,,20,\n8,0.75,40,84%\n", "needs a length, or K and an acceptance rate"),
        # Of n-grams, and of fewer drafts than K, nobody knows what all of them would be.
        ("draft,K,AL,speedup\nngram,8,1.80,1.50x\n", "of 1.20 steps, 1.50×; at one step it would be 1.80×"),
        (
            "draft,K,accept rate,drafted per iteration,speedup\nMTP,4,50 %,2.00,1.50x\n",
            "2.00 tokens per iteration of 1.33 steps, 1.50×; at one step it would be 2.00×",
        ),
        # (1 + 4 · 0.6) / 1.8 with the acceptance of the other row.
        ("draft,K,AL,speedup\na,4,1.80,1.00x\nb,4,3.40,2.00x\n", "at 60 % accepted (row 2) 1.89×, at 1.5 steps 1.20×"),
        ("K,acceptance rate,speedup\n4,63.9%,3.56x\n4,69.4%,3.78x\n4,80.6%,4.22x\n", "speed-ups of 3 rows are what"),
        (
            "mode,in flight,tok/s per user,tok/s,AL\nplain,8,50.0,400,\nMTP,8,150.0,600,3.00\n",
            "(MTP, 8 in flight): 3.00× by tokens/s per user, 1.50× by tokens/s: so far apart, requests queue",
        ),
        # A change is of the speed beside it, in its direction: 41.0 / 24.6 s, 20.0 / 12.5 ms.
        (
            "config,K,accept,latency (s),vs baseline\nbaseline,0,,41.0,—\nEAGLE-3,3,62 %,24.6,-40 %\n",
            "of 1.72 steps, 1.67×. Its acceptance holds it back more: with all accepted 2.33×",
        ),
        ("config,K,accept,TPOT,Δ\nMTP,3,70 %,12.5,−37.5%\n", "3.10 tokens per iteration of 1.94 steps, 1.60×"),
        ("K,accept,Δ tok/s\n3,70 %,+50 %\n", "3.10 tokens per iteration of 2.07 steps, 1.50×"),
        (
            "Config,K,Peak VRAM (GB),Δ,tok/s\nbase,0,20.1,—,41.6\ndflash,7,23.9,+18.9 %,63.2\n",
            "not read: Peak VRAM (GB), Δ ('columns={\"Peak VRAM (GB)\": \"NAME\"}' reads one) no cost",
        ),
        # By time per token 2.80×, while the server's gain is 1.02×.
        (
            "cell,c,TTFT ms,TPOT ms,tok/s\ndspark,16,71292,38.09,1157\noff,16,21650,106.51,1129\n",
            "row 1 (dspark, 16 in flight): 2.80× by ms/token, 1.02× by tokens/s: so far apart, requests queue",
        ),
        # Words in any order; a remark behind a row; the unit of a column in its first cell.
        ("n_max,tok/s mean,baseline tok/s,AL\n2,59.0,38.0,2.42\n", "2.42 tokens per iteration of 1.56 steps, 1.55×"),
        (
            "  --draft-tokens  decode      vs none\n  (none)     37.7 tok/s   --\n  4    59.1    +56.5%  <- best\n",
            "vs none → speedup (of tokens_per_second) no cost of an iteration follows",
        ),
        ("Run,Best n_max,Accept rate,Mean accept len,Speedup\nHTP,3,83.3%,3.50,2.19x\n", "with all accepted 2.50×"),
        ("arm,decode,accept-len\nno spec,26.51 tok/s,—\nDFlash `k=7`,12.20 tok/s,3.21\n", "of 6.98 steps, 0.46×"),
        # A length without the target's own token: 0.64 of 3 draft tokens, less at the ends of answers.
        ("K,mean accepted length,acceptance rate,speedup\n3,1.81,64.0%,2.15\n", "2.81 tokens per iteration of 1.31"),
        ("mode,in flight,tok/s per user,tok/s,AL\nno,1,50.0,400,\nMTP,1,150.0,600,3.60\n", "of 1.20 steps, 3.00×"),
    ],
)  # fmt: skip
def test_costs(audit: Audit, text: str, expected: str) -> None:
    _, printed = audit(pasted=text)
    assert expected in printed


@pytest.mark.parametrize("seed", range(2))
def test_planted_lines_are_found_and_steps_are_named(audit: Audit, seed: int) -> None:
    """Costs that are planted come back from rounded figures: fixed and per token, or the place of the step."""
    rng = random.Random(seed)
    fixed, per_token = rng.uniform(0.9, 1.3), rng.uniform(0.05, 0.4)
    place, height = rng.choice([4, 6]), rng.uniform(0.8, 1.5)

    def table(step: float) -> str:
        lines = ["K,acceptance rate,baseline tok/s,tok/s"]
        for k in (2, 4, 6, 8):
            cost = fixed + per_token * k + (step if k > place else 0)
            rate = round(rng.uniform(0.4, 0.9), 3)
            lines.append(f"{k},{100 * rate:.1f}%,100.0,{100 * (1 + k * rate) / cost:.1f}")
        return "\n".join(lines)

    _, printed = audit(pasted=table(0))
    found = printed.partition("over K: ")[2].split()
    assert float(found[0]) == pytest.approx(fixed, abs=0.03)
    assert float(found[3]) == pytest.approx(per_token, abs=0.01)
    _, printed = audit(pasted=table(height))
    added = height / (fixed + per_token * place)
    assert f"over K: no line, from {place + 1} to {place + 3} tokens +" in printed
    named = float(printed.partition("tokens +")[2].split()[0])
    assert named == pytest.approx(100 * added, abs=1.5)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("speedup=5.9 K=3", 1, "speed-up 5.9 is above 4: K=3 draft tokens and the target's own"),
        ("speedup=2.4 K=4", 0, "no cost of an iteration follows: that needs a length, or K and an acceptance rate"),
        ("speedup=2.40 length=2.60 K=4", 0, "with all accepted 4.62×, at one step 2.60×"),
        ("speedup=3.1 length=3.0 K=3", 0, "3.10×: drafting and verifying must be almost free"),
        ("speedup=2.0 K=3 acceptance=0.70", 0, "3.10 tokens per iteration of"),
        ("length=6.2 k=4", 1, "tokens per iteration 6.2 is above 5"),
        ("baseline=22.7 speed=40.6 acceptance=73.9% K=3", 0, "3.22 tokens per iteration of 1.80 steps, 1.79×"),
        ("baseline=18.05 speed=29.66 K=5", 0, "harness audit baseline=18.05 speed=29.66 acceptance=NUMBER K=5"),
        ("speedup=+34% length=1.90", 0, "1.90 tokens per iteration of 1.42 steps, 1.34×"),
        ("baseline=22.7,88.9 speed=40.6,116.8 acceptance=73.9% K=3", 0, "row 2 (K=3): 3.22 tokens per"),
        ("baseline=95 speed=600 K=4 acceptance=0.55", 1, "speed-up 6.32× by tokens/s is above 5: K=4 draft tokens"),
        # A name that is typed again is the next row's; one value holds for all rows.
        ("baseline=22.7 speed=40.6 baseline=88.9 speed=116.8 acceptance=73.9% K=3", 0, "row 2 (K=3): 3.22 tokens per"),
        ("baseline=130 speed=161 acceptance=74% K=3 speed=118 acceptance=52% K=4", 0, "row 2 (K=4): 3.08 tokens per"),
        # An impossible rate yields no tokens, which no other figure could be held against.
        ("baseline=20 speed=30 K=2 acceptance=180%", 1, "2 of 2 figures, 1 impossible, 1 consistent"),
        # More than K + 1 have no rate and no limit.
        ("length=4.2 K=3 speed=50 baseline=20", 3, "2.50×; at one step it would be 4.20×"),
        ("speedup=+34% K=5,3 acceptance=0.6,0.7", 0, "An iteration costs 2.19 to 3.18 regular steps, in 2 rows"),
        ("acceptance=60% length=2.31 speedup=1.27x K=4", 0, "length of the figure lacks the target's own token, by"),
        # 80 % of those that were tested, 59 % of those that were proposed.
        ("acceptance=80%,60% length=3.36,2.31 speedup=1.85,1.27 K=4", 0, "3.36 1.85× 59 % 2.75×"),
        # It yields 2.6 tokens, and nothing takes less than a step.
        ("speedup=5 K=4 acceptance=0.4", 3, "is above the 2.60 tokens per iteration, in no less than a regular step"),
    ],
)  # fmt: skip
def test_bare_figures(audit: Audit, arguments: str, code: int, expected: str) -> None:
    found, printed = audit(*arguments.split())
    assert (found, expected in printed) == (code, True), printed
    assert "9.5" not in printed


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
        assert "2.65 tokens per iteration of 1.26 steps, 2.10×" in printed, name
    _, printed = audit("vllm.json", "baseline=39.8")
    assert "(K=3): 2.65 tokens" in printed
    assert "with all accepted 3.1" in printed
    # 1.65 of 2.598 draft tokens.
    fewer = {"spec_decode_draft_tokens": 20000, "spec_decode_acceptance_rate": 63.5}
    Path("fewer.json").write_text(json.dumps(vllm | fewer))
    assert audit("fewer.json", "baseline=39.8")[0] == 0
    # SGLang appends a line for each run.
    Path("runs.jsonl").write_text(f"{json.dumps(sglang)}\n{json.dumps(sglang)}\n")
    code, printed = audit("runs.jsonl", "baseline=39.8")
    assert (code, "in 2 rows" in printed) == (0, True)
    assert audit("plain.json", "baseline=vllm.json")[0] == 2
    # A sweep is compared with the run of the same load.
    for name, run in (("sweep", vllm), ("regular", plain)):
        loads = [run | {"max_concurrency": load} for load in (1, 8) if load == 8 or run is vllm]
        Path(f"{name}.json").write_text(json.dumps(loads))
    _, printed = audit("sweep.json", "baseline=regular.json")
    assert "row 2 (K=3, 8 in flight): 2.65 tokens per iteration of 1.26 steps, 2.10×" in printed
    assert "row 1 (K=3): " not in printed
    assert (
        "is no arm of the same runs: load unknown and 8"
        in audit("vllm.json", "baseline=regular.json")[1]
    )


def test_costs_lines_and_advice_are_of_one_load(audit: Audit) -> None:
    """Planted: 1.1 steps and 0.1 for each draft token at 8 in flight, 1.2 and 0.3 at 32; each K has one rate."""
    lines = ["method,K,batch,tok/s,tokens/step", "none,0,8,1000.0,", "none,0,32,2000.0,"]
    for load, regular, fixed, per_token in ((8, 1000, 1.1, 0.1), (32, 2000, 1.2, 0.3)):
        for k in (2, 4, 6):
            speed = regular * (1 + 0.6 * k) / (fixed + per_token * k)
            lines.append(f"eagle,{k},{load},{speed:.1f},{1 + 0.6 * k:.2f}")
    _, printed = audit(pasted="\n".join(lines))
    for load, costs in ((8, "1.10 steps and 0.10"), (32, "1.20 steps and 0.30")):
        assert f"over K of eagle with {load} in flight: {costs} for each draft token" in printed
    assert "An iteration costs 1.80 to 3.00 regular steps with 32 in flight, in 3 rows" in printed
    # The cost of K=2 at 8 in flight is no advice for 32.
    assert "K=2, 32 in flight): 2.20 tokens per iteration of 1.80 steps, 1.22×" in printed
    assert "at 1.5 steps 1.47×" in printed


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model_id", "org/B-7B", "model org/A-8B and org/B-7B"),
        ("dataset_name", "random", "prompts sharegpt and random"),
        ("total_output_tokens", 24000, "output_tokens 150.00 and 300.00"),
        ("total_input_tokens", 12000, "input_tokens 75.000 and 150.00"),
        ("max_concurrency", 8, "load 1 and 8"),
    ],
)
def test_files_of_other_runs_are_no_two_arms(
    audit: Audit, tmp_path: Path, key: str, value: object, named: str
) -> None:
    runs = {"completed": 80, "total_input_tokens": 6000, "total_output_tokens": 12000}
    runs |= {"model_id": "org/A-8B", "dataset_name": "sharegpt", "max_concurrency": 1}
    Path("with.json").write_text(json.dumps(runs | {"mean_tpot_ms": 8.0, "accept_length": 2.0}))
    for other, expected in (
        (runs, "2.00 tokens per iteration of 1.43 steps, 1.40×"),
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
        ("name,b,bb,d,e,f,g,h,i,j\nx,1,2,3,4,5,6,7,8,9\n", "not read: b, bb, d, e, f, g, h, i, 1 more ("),
        ("Metric,MTP 1,MTP 8,Δ\nAccept length,1.84,4.40,+139.1%\n", "read: no column; not read: MTP 1, MTP 8, Δ ("),
        # The line to type, with what is known of the first row.
        (
            "Model,n_max,Decode Δ\nA,2,22.7 → 40.6 (+79%)\n",
            "harness audit baseline=22.7 speed=40.6 acceptance=NUMBER K=2",
        ),
        (
            "Model,Baseline,MTP\nA,130.9 t/s,161.2 t/s @ 73.9%\n",
            "harness audit baseline=130.9 speed=161.2 acceptance=73.9% K=NUMBER",
        ),
        (
            "Setup,Avg tok/s\nllama-server (no spec),92.5\ndflash (no draft),73.1\ndflash + drafter,121.4\n",
            "harness audit baseline=92.5,73.1 speed=121.4 acceptance=NUMBER K=NUMBER",
        ),
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


def test_a_bad_argument_ends_in_one_line(audit: Audit, tmp_path: Path) -> None:
    Path("a.csv").write_text("K,AL\n4,2.5\n")
    Path("b.csv").write_bytes("K,AL\n4,2.5\n".encode("utf-16"))
    for arguments, expected in (
        ([], "takes one file with one value of each NAME, or figures"),
        (["none.csv"], "No such file"),
        ([""], "directory"),
        (["b.csv"], "is no text in UTF-8"),
        (["a.csv", "bach_size=3"], "did you mean batch_size?"),
        (["a.csv", "batch_size=many"], "batch_size=many: must be a number"),
        (["K=-1", "speedup=2"], "K=-1: must be a number"),
        (
            ["acceptance=72", "speedup=2"],
            "acceptance=72: must be a number or a range, in its own unit: a share as 72%",
        ),
        (
            ["baseline=33ms", "speed=22ms"],
            "a time per token as ms_per_token=22 and regular_ms_per_token=33",
        ),
        (
            ["speedup=2", "K=3", "speedup=3", "K=4", "K=5"],
            "speedup=2,3: must have one value, or one for each of 3 rows",
        ),
        (["speedup=34%"], "speedup=34%: may be a part: write +34% for a gain"),
        (["speedup=2,3,4", "K=3,4"], "K=3,4: must have one value, or one for each of 3 rows"),
        (["a.csv", "K=3,4"], "takes one file with one value of each NAME"),
        (["a.csv", "columns={AL"], "must be {HEADING: NAME, ...}"),
        (["a.csv", "columns={AL}"], "no such NAME"),
        (["a.csv", "columns={LA: speedup}"], "no table has this column (did you mean AL?)"),
        (["a.csv", "columns={AL: speed_up}"], "did you mean speedup?"),
        (["a.csv", "baseline=none.json"], "No such file"),
    ):
        code, message = audit(*arguments)
        assert (code, expected in message) == (2, True), (arguments, message)
    assert "is no text in UTF-8" in audit(pasted="K,AL\n4,2.5\n".encode("utf-16"))[1]


def test_exit_codes(audit: Audit) -> None:
    assert audit(pasted="K,AL\n4,2.5\n")[0] == 0
    assert audit(pasted="K,AL\n4,5.5\n")[0] == 1
    assert audit(pasted="tok/s,baseline tok/s,speedup\n365,187,2.40\n")[0] == 3
    code, printed = audit(pasted="draft,speedup\nx,2.5\n")
    assert (code, "nothing could be checked" in printed) == (3, True)
    # What cannot be heads no page.
    code, printed = audit(pasted="K,AL,speedup\n4,6.2,2.0x\n")
    assert (code, "steps" in printed) == (1, False)

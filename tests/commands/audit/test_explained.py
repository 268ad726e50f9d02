"""`audit` explains what people post: the cost of an iteration, what holds a speed-up back, and what else would give."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable

import pytest

from harness.commands.audit.command import main
from harness.config.errors import SettingError, VerdictError

Audit = Callable[..., tuple[int, str]]


class Pasted(io.TextIOWrapper):
    def __init__(self, text: str) -> None:
        super().__init__(io.BytesIO(text.encode()))


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Audit:
    """What `audit` prints of pasted text, or of arguments alone, on one line; with its exit code."""

    def run(*arguments: str, pasted: str = "") -> tuple[int, str]:
        if pasted:
            monkeypatch.setattr(sys, "stdin", Pasted(pasted))
        code, message = 0, ""
        try:
            main([*arguments, *(["-"] if pasted else [])])
        except (SettingError, VerdictError) as error:
            code, message = error.exit_code, str(error)
        return code, " ".join(f"{capsys.readouterr().out} {message}".split())

    return run


# The form of llama.cpp #26750.
BACKENDS = """\
| Backend / GPU | n-max | accept rate | decode vs baseline |
|---|---|---|---|
| CUDA | 6 | **35.8%** | **−32%** (61 vs 90 tok/s) |
| Vulkan | 6 | **92.2%** | **+128%** (218 vs 96 tok/s) |
"""


def test_a_thread_gets_its_answer(audit: Audit) -> None:
    """1 + 6 × 0.358 = 3.148 tokens at 0.68×: 4.63 steps; at 92.2 % 6.532 ÷ 4.63 = 1.41×."""
    code, printed = audit(pasted=BACKENDS)
    assert code == 0
    assert "An iteration costs 2.86 to 4.63 regular steps, in 2 rows" in printed
    slow = "row 1 (CUDA, K=6): 3.15 tokens per iteration of 4.63 steps, 0.68×."
    assert (
        f"{slow} Its acceptance holds it back more: at 92% accepted (row 2) 1.41×, at 2.9 steps (row 2) 1.09×"
        in printed
    )
    assert "assumed: K tokens are drafted in every iteration, and the first token" in printed
    assert "yours to fill in harness latency model=YOUR_MODEL draft=YOUR_DRAFT K=6" in printed
    assert "harness latency -- YOUR_SERVER_COMMAND" in printed


def test_the_acceptance_may_be_what_holds_it_back(audit: Audit) -> None:
    text = (
        "| mode | K | AL | tk/s |\n|---|---|---|---|\n| plain | | | 50 |\n| MTP | 8 | 1.80 | 75.0 |"
    )
    _, printed = audit(pasted=text)
    assert (
        "1.80 tokens per iteration of 1.20 steps, 1.50×. Its acceptance holds it back more"
        in printed
    )
    assert "with all accepted 7.50×" in printed


def test_a_length_of_another_k_is_named(audit: Audit) -> None:
    """rMLX #496: at K = 3 with 72.8 %, 1 + p + p² + p³ = 2.64, and 2.26 is without the last."""
    text = (
        "| Pair | Block | Accept rate | tokens/step | speedup |\n|---|---|---|---|---|\n"
        "| a | 2 | 0.877 | 2.65 | 1.36× |\n| a | 3 | 0.728 | 2.26 | 1.23× |\n"
        "| b | 3 | 0.895 | 3.41 | 1.34× |\n| c | 6 | 0.731 | 3.30 | 1.90× |"
    )
    code, printed = audit(pasted=text)
    assert code == 3
    assert (
        "row 2 (a, K=3): tokens per iteration 2.26 is what K=2 gives at 0.728 accepted" in printed
    )
    assert "K=3 gives 2.64, and an iteration costs 2.15 steps" in printed
    assert printed.count("unlikely:") == 1
    right = text.replace("2.26", "2.64")
    assert audit(pasted=right)[0] == 0


@pytest.mark.parametrize("seed", range(2))
def test_planted_lines_are_found_and_steps_are_named(audit: Audit, seed: int) -> None:
    """Costs that are planted come back from rounded figures: fixed and per token, or the place of the step."""
    rng = random.Random(seed)
    fixed, each = rng.uniform(0.9, 1.3), rng.uniform(0.05, 0.4)
    place, height = rng.choice([4, 6]), rng.uniform(0.8, 1.5)

    def table(step: float) -> str:
        lines = ["K,acceptance rate,baseline tok/s,tok/s"]
        for k in (2, 4, 6, 8):
            cost = fixed + each * k + (step if k > place else 0)
            rate = round(rng.uniform(0.4, 0.9), 3)
            lines.append(f"{k},{100 * rate:.1f}%,100.0,{100 * (1 + k * rate) / cost:.1f}")
        return "\n".join(lines)

    _, printed = audit(pasted=table(0))
    found = printed.partition("over K: ")[2].split()
    assert float(found[0]) == pytest.approx(fixed, abs=0.03)
    assert float(found[3]) == pytest.approx(each, abs=0.01)
    _, printed = audit(pasted=table(height))
    before, after = (fixed + each * place, fixed + each * (place + 2) + height)
    change = after / before - 1
    assert f"over K: no line, from {place + 1} to {place + 3} tokens +" in printed
    named = float(printed.partition("tokens +")[2].split()[0])
    assert named == pytest.approx(100 * change, abs=1.5)


def test_bare_figures(audit: Audit) -> None:
    code, printed = audit("speedup=5.9", "K=3")
    assert code == 1
    assert "speed-up 5.9 is above 4: K=3 draft tokens and the target's own" in printed
    # (2.4 - 1) / 4 and 5 / 2.4.
    code, printed = audit("speedup=2.4", "K=4")
    assert code == 0
    assert "at least 35% must be accepted, and if all are, an iteration may cost 2.08" in printed
    code, printed = audit("speedup=2.40", "length=2.60")
    assert "An iteration costs 1.08 regular steps" in printed
    assert "drafting and verifying must be almost free" in printed
    code, printed = audit("speedup=2.0", "K=3", "acceptance=0.70")
    assert "3.10 tokens per iteration of" in printed
    assert audit("K=3", "model=x")[0] == 2
    assert audit("speedup=fast", "K=3")[0] == 2


@pytest.mark.parametrize("sentence", [
    "Our draft is 3.0x faster, with an acceptance rate of 70.0% at 4 draft tokens.",
    "MTP gives 3.00× speedup (K=4, 70.0 % accepted).",
    "With n-max 4 and acceptance = 0.700 decode is 3.0 times faster!",
])  # fmt: skip
def test_a_sentence_without_a_table(audit: Audit, sentence: str) -> None:
    code, printed = audit(sentence)
    assert code == 0, printed
    assert "3.80 tokens per iteration" in printed
    assert "(K=4)" in printed


def test_prose_below_a_table_is_read_too(audit: Audit) -> None:
    card = f"{BACKENDS}\nOn MT-bench it is 5.9× faster with an acceptance rate of 62 % at 4 draft tokens.\n"
    code, printed = audit(pasted=card)
    assert code == 1
    assert "sentence 1 (K=4): speed-up 5.9× is above 5" in printed


@pytest.mark.parametrize("sentence", [
    "It is up to 9x faster at K=4.",
    "We ran on 3x H100, K=4, with 70 tasks.",
    "Accuracy is 70 % and it takes 3x the memory at 4 draft tokens.",
])  # fmt: skip
def test_other_sentences_claim_nothing(audit: Audit, sentence: str) -> None:
    code, printed = audit(sentence)
    assert (code, "nor a sentence or log with figures" in printed) == (2, True)


LLAMA_CPP = """\
slot print_timing: id 0 | prompt eval time = 100.00 ms / 50 tokens
       eval time = {regular} ms / 101 tokens ( 20.00 ms per token, 50.00 tokens per second)
slot print_timing: id 0 | prompt eval time = 100.00 ms / 50 tokens
       eval time = 1010.00 ms / 101 tokens ( 10.00 ms per token, 100.00 tokens per second)
      total time = 1110.00 ms / 151 tokens
draft acceptance rate = 0.80000 (   60 accepted /   75 generated)
"""


def test_a_log_of_llama_cpp(audit: Audit) -> None:
    """100 tokens after the first in 40 iterations: 2.5 each, 75 ÷ 40 drafted, and twice as fast."""
    _, printed = audit(pasted=LLAMA_CPP.format(regular="2020.00"))
    assert "2.50 tokens per iteration of 1.25 steps, 2.00×" in printed
    _, printed = audit(
        "baseline=50.00", pasted="draft acceptance rate = 0.71 (852 accepted / 1200 generated)\n"
    )
    assert "acceptance rate 1" in printed


def test_lines_of_a_benchmark(audit: Audit) -> None:
    text = (
        "  code_python  pred= 192 draft=   0 acc=   0 rate=n/a tok/s=40.0\n"
        "  code_python  pred= 192 draft= 153 acc= 139 rate=0.908 tok/s=80.0\n"
    )
    # 191 tokens in 52 iterations.
    _, printed = audit(pasted=text)
    assert "3.67 tokens per iteration of 1.84 steps, 2.00×" in printed


def test_a_log_of_vllm(audit: Audit) -> None:
    line = (
        "INFO [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.87, Accepted throughput: 9.40 tokens/s,"
        " Drafted throughput: 15.10 tokens/s, Accepted: 282 tokens, Drafted: 453 tokens, Per-position acceptance"
        " rate: 0.821, 0.609, 0.437, Avg Draft acceptance rate: 62.3%\n"
        "INFO [loggers.py:271] Engine 000: Avg generation throughput: 43.3 tokens/s, Running: 1 reqs\n"
    )
    code, printed = audit("baseline=30.0", pasted=line)
    assert code == 0
    # 3 positions, 151 iterations, 282 accepted.
    assert "2.87 tokens per iteration of 1.99 steps, 1.44×" in printed


def test_a_log_of_sglang(audit: Audit) -> None:
    text = (
        "Decode batch. accept len: 3.00, cuda graph: True, gen throughput (token/s): 140.0\n"
        "Decode batch. accept len: 3.20, cuda graph: True, gen throughput (token/s): 150.0\n"
        "Decode batch. #running-req: 1, cuda graph: True, gen throughput (token/s): 100.0\n"
    )
    _, printed = audit(pasted=text)
    assert "3.10 tokens per iteration of 2.14 steps, 1.45×" in printed


def test_a_user_and_all_of_them(audit: Audit) -> None:
    """The speed of one user, not the server's throughput, says what an iteration costs."""
    text = (
        "| mode | in flight | tok/s per user | total throughput tok/s | accept len |\n|---|---|---|---|---|\n"
        "| no speculation | 8 | 50.0 | 400 | |\n| DSpark | 8 | 100.0 | 500 | 3.00 |"
    )
    _, printed = audit(pasted=text)
    assert "3.00 tokens per iteration of 1.50 steps, 2.00×" in printed


def test_where_k_is_a_limit_the_rate_gives_no_cost(audit: Audit) -> None:
    text = "| draft | K | accept rate | speedup |\n|---|---|---|---|\n| ngram | 8 | 50 % | 1.50× |"
    _, printed = audit(pasted=text)
    assert "An iteration costs" not in printed


def test_the_alpha_of_papers_is_of_tested_tokens(audit: Audit) -> None:
    """1 + α + … + α⁷ = 3.60, not 1 + 7 α."""
    text = "| method | γ | α | speed-up |\n|---|---|---|---|\n| T5-small | 7 | 0.750 | 3.40× |"
    _, printed = audit(pasted=text)
    assert "3.60 tokens per iteration of 1.06 steps" in printed
    assert audit(pasted=text.replace("0.750", "125%"))[0] == 1


def test_slower_at_any_acceptance(audit: Audit) -> None:
    """A length without the target's own token, as its rate shows: 1.56 tokens of 2.04 steps, and two tokens at most."""
    text = (
        "| mode | K | t/s | acceptance rate | mean accepted len |\n|---|---|---|---|---|\n"
        "| none | | 14.5 | | |\n| MTP | 1 | 11.1 | 55.6% | 0.56 |"
    )
    code, printed = audit(pasted=text)
    assert code == 0
    assert "1.56 tokens per iteration of 2.04 steps" in printed
    assert "slower than regular decoding even with all accepted (0.98×)" in printed


def test_more_than_speculation_differs(audit: Audit) -> None:
    text = "| n-max | decode tok/s | accept rate |\n|---|---|---|\n| 0 | 14.20 | |\n| 2 | 38.30 | 79.8% |"
    _, printed = audit(pasted=text)
    assert "less than one step, so that more than speculation differs" in printed


def test_commands_that_are_printed_compose(audit: Audit) -> None:
    """Names of a table are no presets: what is typed is a preset, a repository, or said to be the user's."""
    text = (
        "model,draft,K,temperature,prompts,num prompts,speedup,AL\n"
        "Llama-3.1-8B,EAGLE3,3,greedy,MT-bench,80,1.9,2.5\n"
        "Qwen/Qwen3-8B,lookup,4,0,gsm8k,80,1.2,1.5\n"
    )
    _, printed = audit("details=true", pasted=text)
    assert (
        "latency model=YOUR_MODEL draft=YOUR_DRAFT prompts=mt_bench num_prompts=80 K=3" in printed
    )
    assert "YOUR_DRAFT: a preset, path or repository (there: EAGLE3)" in printed
    assert (
        "latency model=Qwen/Qwen3-8B draft=lookup prompts=gsm8k num_prompts=80 temperature=0 K=4"
        in printed
    )

"""Does a server accept what the weights of its draft say? Our own `serve`, honest and with planted faults.

A healthy drafter is called broken in one run of a million.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from echo_server import EchoServer, serving
from harness.commands.acceptance.page import acceptance_page
from harness.commands.acceptance.served import likelihood_columns, repeated_share, served_columns
from harness.engines.counts import DraftCounts
from harness.engines.door.reading import ReadText
from harness.engines.requests import RequestRecord
from harness.measuring.acceptance import longest_of
from harness.results.files import write_rows
from harness.results.judging.acceptance import engine_statement
from harness.results.rows.acceptance import (
    CAUSES_FILE,
    AcceptanceCauseRow,
    AcceptanceRow,
    row_in_question,
)
from harness.results.runs import Run
from harness.results.statistics.interval import Interval
from harness.results.statistics.iterations import acceptance_chances, cut
from in_process import QUICK_MODELS, Harness, only, results
from planted_faults import planted
from served import served
from shipped_copies import copy_shipped
from wording import mentions

# With fewer prompts, a fault is close to the 4.75 standard deviations that decide, and rounding on another CPU tips it.
ASKED = "num_prompts=16 texts_per_prompt=1 batch_size=16 tokens=64 up_to=4".split()

# Settings of the server and of the client.
Planted = tuple[list[str], list[str]]


def without_its_window(directory: Path) -> Planted:
    """A draft with a sliding window, which the server reads as full attention."""
    window = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 2}
    copy_shipped(directory, num_hidden_layers=1, **window)
    return QUICK_MODELS, ["model=tiny_draft", f"draft={directory}"]


def honest(directory: Path) -> Planted:
    return QUICK_MODELS, QUICK_MODELS


def without_the_last(directory: Path) -> Planted:
    """A server that never uses the last draft token."""
    return [*QUICK_MODELS, f"engine={planted('LastDropped')}"], [*QUICK_MODELS, "T=0"]


def greedily(directory: Path) -> Planted:
    """A server that drafts greedily, as most do; the client does not know."""
    return [*QUICK_MODELS, "draft.sampling=greedy"], QUICK_MODELS


def compared(directory: Path) -> Planted:
    """A server that keeps a draft token where the target draws the same one."""
    server = [*QUICK_MODELS, f"engine={planted('SamplesCompared')}"]
    # The warmer, the more of what rejection accepts is lost.
    return server, [*QUICK_MODELS, "T=1.6"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (honest, "as the weights predict"),
        (greedily, "as the weights predict"),
        (without_its_window, "accepts more than the weights predict"),
        (compared, "accepts less than the weights predict"),
        (without_the_last, "explained by the last draft token left out"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_seen(
    harness: Harness, tmp_path: Path, plant: Callable[[Path], Planted], words: str
) -> None:
    server_words, client_words = plant(tmp_path / "planted")
    with served(tmp_path, *server_words) as url:
        address = [f"engine.url={url}/v1", "engine=server"]
        outcome = harness("acceptance", *address, *client_words, *ASKED, code=None)
    assert outcome.exit_code == (0 if plant in (honest, greedily) else 1), outcome
    assert words in outcome.stdout.lower() + outcome.stderr, outcome
    rows = results("acceptance").set_index("num_draft_tokens")
    assert rows.weights_tokens_per_iteration[[1, 2, 3]].isna().all()
    assert (rows.draft_sampling == "greedy").all() == (plant is greedily)


@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp"])
def test_a_server_alone_is_counted_by_position(harness: Harness, dialect: Any) -> None:
    """Four draft tokens, of which three, one and one are accepted: 3 + 1 + 1 of 3, 1 and 1 tests. llama.cpp's answers
    have totals alone.
    """
    drafts = ((4, 3), (4, 1), (4, 1))
    server = EchoServer(dialect=dialect, version="1", drafts=drafts, drafts_until="end")
    with serving(server) as url:
        outcome = harness(
            "acceptance",
            f"url={url}",
            "engine.model=tiny",
            "n=8",
            "tokens=13",
            "causes=none",
            "T=0",
            "K=8",
        )
    assert mentions(outcome.stdout, "Missing", "the weights: model=")
    is_by_position = dialect == "vllm"
    [row] = results("acceptance").to_dict("records")
    # The server drafts four tokens, whatever is typed, and was sent eight requests.
    assert (row["num_draft_tokens"], row["batch_size"]) == (4, 8)
    assert "at K=4" in outcome.stdout
    # Nobody here knows the tokens of a text: they are the server's, 12 behind the first of each answer.
    assert row["num_tokens"] == 8 * 12
    texts = pd.read_csv(only("acceptance_texts.csv"))
    assert set(texts.num_tokens) == {12}
    assert pd.isna(row["repeated_share"])
    assert texts.token_ids.isna().all()
    assert texts.completion.notna().all()
    # One token, then 4 + 2 + 2 + 4 of 13.
    assert row["tokens_per_iteration"] == pytest.approx(3)
    places = pd.read_csv(only("acceptance_causes.csv")).set_index("position").served
    if is_by_position:
        assert places[[1, 2]].tolist() == pytest.approx([1, 0.5])


def test_a_server_of_another_vocabulary_is_named(harness: Harness) -> None:
    def raise_ids(event: Any) -> Any:
        for choice in event["choices"] if event else ():
            choice["token_ids"] = [token + 10**9 for token in choice["token_ids"]]
        return event

    with serving(EchoServer(num_draft_tokens=4, twist=raise_ids)) as url:
        asked = [f"engine.url={url}", "engine=server", *QUICK_MODELS, *ASKED]
        complaint = harness("acceptance", *asked, code=1).complaint
    assert "is not in the model's vocabulary of 960 tokens: is another model served?" in complaint


def test_text_that_repeats_itself() -> None:
    assert repeated_share([[1, 2] * 10, [*range(20)]]) == pytest.approx(15 / 40)


def read_text(is_own: bool, k: int = 1) -> ReadText:
    """Of 41 certain tokens, whose drafts of up to K tokens are right in a third of the places."""
    target_rates = np.full(41, 1.0 if is_own else 0.1)
    drafts = np.resize([1.0, 0.0, 0.0], (40, k))
    return ReadText(
        cut=cut(acceptance_chances(target_rates, drafts)),
        num_tokens=41,
        num_impossible=0,
        log_probability=0.0 if is_own else -90.0,
        expected=0.0,
        variance=1.0,
    )


def test_texts_are_as_likely_as_their_possible_tokens() -> None:
    """2 of 82 tokens cannot be drawn; the others have -120 nats, where -100 ± 5 are expected.

    Of 100 tokens in 50 ± 2 iterations 4.75 deviations are 40.5 to 59.5. Rounding moves the iterations of each text by
    half of one, and twice as much is allowed: 2 iterations of 50, or 4 % of 2 tokens.
    """
    figures = {"num_impossible": 1, "log_probability": -60.0, "expected": -50.0, "variance": 12.5}
    known: Any = SimpleNamespace(num_tokens=50, iterations=[25.0], variance=[2.0])
    rounded: Any = SimpleNamespace(num_tokens=50, iterations=[25.5], variance=[2.0])
    texts = [replace(read_text(is_own=True), cut=known, rounded=rounded, **figures)] * 2
    likely = {"log_probability": -1.5, "own_log_probability": -1.25, "likelihood_z": -4.0}
    assert likelihood_columns(texts) == pytest.approx(likely | {"impossible_share": 2 / 82})
    found = served_columns(texts, [], 1)
    assert found["engine_unknown"] == "the texts are not the model's"
    tokens = found["weights_tokens_per_iteration"]
    expected = [100 / 50, 100 / 59.5 - 0.08, 100 / 40.5 + 0.08]
    assert [tokens.estimate, tokens.low, tokens.high] == pytest.approx(expected)


TOTALS: dict[str, Any] = {"drafts": DraftCounts(proposed=27, accepted=13), "max_new_tokens": 41}


def test_a_drafter_is_judged_by_what_its_server_reports() -> None:
    for is_own, answer, words in [
        (True, TOTALS, "as the weights predict"),
        (True, {"outcomes": [(1, 1)] * 13 + [(1, 0)] * 14}, "as the weights predict"),
        (True, {"outcomes": [(1, 1)] * 5 + [(1, 0)] * 30}, "accepts less than the weights predict"),
        # It drafts where it expects to be right, and not in every iteration.
        (True, {"outcomes": [(1, 1)] * 5 + [(0, 0)] * 30}, "cannot tell"),
        (
            True,
            TOTALS | {"drafts": DraftCounts(proposed=22, accepted=18)},
            "accepts more than the weights predict",
        ),
        (True, {}, "cannot tell"),
        # It ended by itself: what was accepted may be behind its end.
        (True, TOTALS | {"max_new_tokens": 64}, "cannot tell"),
        # A burst for each iteration.
        (True, {"arrivals": [0.0, *np.arange(1.0, 28.0)]}, "as the weights predict"),
        # What arrives together is no report: it accuses nobody.
        (True, {"arrivals": [0.0, *np.arange(1.0, 36.0)]}, "cannot tell"),
        # Counts that the weights and what arrived contradict.
        (
            True,
            {"outcomes": [(1, 0)] * 40, "arrivals": [0.0, *np.arange(1.0, 28.0)]},
            "as the weights predict",
        ),
        (False, TOTALS, "cannot tell"),
        (False, {}, "cannot tell"),
    ]:
        request = RequestRecord(0, 3, token_ids=[5] * 41, num_tokens=41, **answer)
        columns = served_columns([read_text(is_own)], [request], 1)
        found = engine_statement(AcceptanceRow(**columns))
        assert found is not None
        assert found.words == words, columns
    # Most iterations of short answers are among the last ones, which may draft fewer tokens than K.
    short = [RequestRecord(0, 3, num_tokens=4, outcomes=[(1, 0)] * 3) for _ in range(10)]
    columns = served_columns([read_text(True, 4)] * 10, short, 4)
    assert columns["engine_unknown"] == "the engine may draft fewer than K=4"


def test_the_k_of_a_server_is_that_which_its_totals_show() -> None:
    for answer, expected in [
        ({"outcomes": [(2, 1), (1, 0)]}, 2),
        # Fewer are drafted where an answer ends.
        ({"drafts": DraftCounts(proposed=79, accepted=30)}, 8),
        ({}, None),
    ]:
        request = RequestRecord(0, 3, **{"num_tokens": 41, "max_new_tokens": 41} | answer)
        assert longest_of([request]) == expected


def test_the_k_that_was_served_is_in_the_headline() -> None:
    rows = [AcceptanceRow(num_draft_tokens=k, tokens_per_iteration=Interval(k)) for k in (2, 3, 4)]
    assert row_in_question(rows).num_draft_tokens == 4
    rows[1] = replace(rows[1], is_in_question=True)
    assert row_in_question(rows).num_draft_tokens == 3


def test_only_measured_causes_of_a_difference_are_excluded(tmp_path: Path) -> None:
    weights = Interval(4.0, 3.7, 4.3)
    row = AcceptanceRow(
        run="1", num_draft_tokens=4, tokens_per_iteration=weights, impossible_share=0.0,
        weights_tokens_per_iteration=weights,
    )  # fmt: skip
    for counted, measured, is_said in [
        (2.0, {"weights": Interval(3.0, 2.9, 3.1)}, True),
        (2.0, {"why": "needs bitsandbytes"}, False),
        # Between three and 4.75 standard deviations (0.3), it is not known whether anything differs.
        (3.75, {"weights": Interval(3.0, 2.9, 3.1)}, False),
    ]:
        typed = AcceptanceCauseRow(run="1", served=Interval(counted), weights=weights)
        late = replace(typed, cause="positions", condition="late", is_asked=False, weights=None)
        (tmp_path / CAUSES_FILE).unlink(missing_ok=True)
        write_rows(tmp_path / CAUSES_FILE, [typed, replace(late, **measured)])
        asked = replace(row, served_tokens_per_iteration=counted)
        page = acceptance_page([Run([asked], directory=tmp_path)])
        assert page is not None
        said = [line.text for line in page.finding]
        assert any(text.startswith("None of the measured") for text in said) == is_said

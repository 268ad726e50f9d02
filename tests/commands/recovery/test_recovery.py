"""`recovery` through the command line: its requests, verdicts as exit codes, rows, and the faults that it finds."""

import dataclasses
import itertools
import operator
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from documented import ROOT, words_of
from echo_questions import TOKENIZER
from forked import HALTED, halting, start
from harness.commands.recovery.sampling import samplings
from harness.commands.recovery.scores import ScoredText, choose_place
from harness.commands.recovery.workload import Answer, Asking, PlannedRequest, Workload
from harness.config.settings import DecodingSettings
from harness.engines.requests import RequestRecord
from harness.local.decoding.loop import BatchRow, RowStep
from in_process import Harness, results
from planted_faults import IN_BATCHES, planted
from processes import end
from served import serving
from tiny_checkpoints import save_talkative_pair

SMALL = ["num_prompts=3", "tokens=12", "K=2", "temperature=3", "batch_size=6"]
SMALL += ["num_draws=800", "shift=0.3", "false_alarm_rate=1e-6"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def pair(directory: Path) -> list[str]:
    return save_talkative_pair(directory, 8)


@pytest.mark.slow
def test_an_honest_pair_is_lossless(harness: Harness, pair: list[str]) -> None:
    harness("recovery", *pair, *SMALL)
    rows = results("recovery")
    assert list(rows["check"]) == ["greedy", "kernels", "sampled"]
    assert set(rows["verdict"]) == {"lossless"}
    assert rows["sampling"].iloc[-1] == "as asked, temperature=1, top_k=5, top_p=0.8"
    assert (rows["batch_size"] == 6).all()
    by_kind = rows.set_index("check")
    assert by_kind.loc["sampled", "num_draws"] == pytest.approx(800, rel=0.15)
    assert by_kind.loc["greedy", ["identical_prompts", "num_prompts"]].tolist() == [15, 15]


@pytest.mark.slow
def test_too_few_draws_say_how_many_are_enough(
    harness: Harness, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = harness("recovery", *pair, *SMALL, "num_draws=200", code=3)
    said = re.search(r"; at least num_draws=(\d+) is needed$", outcome.complaint)
    needed = results("recovery")["num_draws_needed"].iloc[-1]
    assert int(said[1]) == pytest.approx(needed, rel=0.1)
    # So many are taken by default.
    monkeypatch.setattr("harness.commands.recovery.measure._FEWEST_TOKENS", 100)
    harness("recovery", *pair, *SMALL, "num_draws=auto")
    assert results("recovery")["num_draws"].iloc[-1] == pytest.approx(int(said[1]), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [planted(name) for name in IN_BATCHES])
def test_faults_are_found(harness: Harness, pair: list[str], fault: str) -> None:
    asked = [*pair, *SMALL, "num_draws=1200", "batch_size=12"]
    outcome = harness("recovery", *asked, f"engine={fault}", code=1)
    assert outcome.complaint.startswith("lossy: ")


@pytest.mark.slow
@pytest.mark.usefixtures("own_methods")
def test_the_documented_mistake_is_found(harness: Harness, pair: list[str]) -> None:
    page = (ROOT / "docs" / "losslessness.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n# early_bonus\.py\n(.*?)```", page, re.DOTALL)
    Path("early_bonus.py").write_text(code, encoding="utf-8")
    [line] = re.findall(r"^harness (recovery decoding\.rule=\./early_bonus.*)$", page, re.MULTILINE)
    outcome = harness(*words_of(line), *pair, *SMALL, code=1)
    assert outcome.complaint.startswith("lossy: ")


@pytest.mark.slow
def test_a_text_that_goes_on_behind_its_end_is_lossy(
    harness: Harness, pair: list[str], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in transformers #47912: only the last token of an iteration ends a text."""
    take = BatchRow.take

    def take_whole(row: BatchRow, numbers: list[float], vocabulary_size: int) -> RowStep:
        request = row.request
        last = {int(numbers[1])}
        row.request = dataclasses.replace(request, stop_tokens=request.stop_tokens & last)
        taken = take(row, numbers, vocabulary_size)
        row.request = request
        return taken

    monkeypatch.setattr(BatchRow, "take", take_whole)
    twin = shutil.copytree(directory / "target", directory / "twin")  # which always agrees
    outcome = harness("recovery", *pair, *SMALL, f"draft={twin}", code=1)
    assert "texts continue past a token that should end them" in outcome.complaint
    assert results("recovery")["num_past_end"].iloc[-1] > 0


@pytest.mark.slow
def test_greedy_alone_and_a_failed_run(harness: Harness, pair: list[str]) -> None:
    asked = [*pair, *SMALL]
    harness("recovery", *asked, "decoding.temperature=0")
    lenient = ["decoding.rule=google", "decoding.lenience=0.5"]
    # Its greedy texts are the target's: the check does not show that it is lossy by definition.
    harness("recovery", *asked, "decoding.temperature=0", *lenient, code=1)
    too_long = harness("recovery", *asked, "decoding.max_new_tokens=1000", code=2)
    assert "two answers of decoding.max_new_tokens=1000 and the question" in too_long.stderr
    too_many = harness("recovery", *asked, "batch_size=100000000", code=1)
    assert "what would fit: batch_size=" in too_many.stderr
    rows = results("recovery").query("check != 'kernels'")
    # A wrong setting leaves no row.
    assert list(rows["status"]) == ["ok", "ok", "failed"]
    assert rows["verdict"].fillna("none").tolist() == ["lossless", "undecided", "none"]


def test_a_run_ends_at_the_first_look_that_finds_a_loss(
    harness: Harness, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    ask = Asking.ask

    def noted(asking: Asking, *arguments: Any) -> Any:
        asked.append(arguments[-1])
        return ask(asking, *arguments)

    monkeypatch.setattr(Asking, "ask", noted)
    # All checks count as lossy.
    monkeypatch.setattr("harness.commands.recovery.measure.is_lossy", bool)
    few = ["num_draws=1000", "num_prompts=2", "decoding.max_new_tokens=6", "batch_size=16"]
    harness("recovery", *pair, *few, code=None)
    assert asked == ["asking, first turns"]


@pytest.mark.parametrize("asked", [1, 0])
def test_an_interrupted_run_says_what_was_tested_so_far(
    tmp_path: Path, pair: list[str], asked: int
) -> None:
    """In the second of two rounds, or in the first one."""
    few = ["num_draws=1000", "num_prompts=2", "decoding.max_new_tokens=6", "batch_size=16"]
    halt = halting("harness.commands.recovery.workload.Asking.ask", after=asked)
    running = start("recovery", *pair, *few, cwd=tmp_path, until=HALTED, before=halt)
    stdout, stderr = end(running, signal.SIGINT, 130)
    assert "lossless" not in stdout
    [file] = tmp_path.glob("outputs/recovery/*/*/recovery.csv")
    rows = pd.read_csv(file)
    assert set(rows["status"]) == {"interrupted"}
    if asked:
        assert set(rows["verdict"]) == {"undecided"}
        assert rows["num_prompts"].iloc[0] == rows["identical_prompts"].iloc[0] > 0
        assert 0 < rows["num_draws"].iloc[-1] < 1000
    else:
        assert rows["verdict"].isna().all()
        assert "interrupted before the first check of the speculative arm was complete" in stderr


@pytest.mark.slow
def test_our_service_is_tested_over_http(harness: Harness, tmp_path: Path, pair: list[str]) -> None:
    asked = [*pair[:2], "runner=eager"]
    with serving(tmp_path, *asked) as (url, _):
        servers = ["engine=server", f"url={url}/v1", f"regular_url={url}/regular/v1"]
        few = ["num_draws=400", "samplings=[as_asked]"]
        harness("recovery", *SMALL, pair[0], pair[2], *servers, *few)
    rows = results("recovery")
    assert "lossy" not in set(rows["verdict"])


DECODING = DecodingSettings(max_new_tokens=12, num_draft_tokens=2, temperature=1.0)
PROMPTS = [list(TOKENIZER.encode(text)) for text in ("once upon a time", "2 + 2 =", "the end")]


def workload() -> Workload:
    settings: Any = SimpleNamespace(decoding=DECODING, seed=0)
    return Workload(Asking(settings, PROMPTS, samplings(DECODING), frozenset()))


def test_the_requests_are_mixed() -> None:
    made = workload()
    asked = made.first_turns(40)
    assert len({one.index for one in asked}) == len(asked)
    assert {one.sampling.name for one in asked} == {
        "greedy", "as asked", "temperature=0.7", "top_k=5", "top_p=0.8",
    }  # fmt: skip
    assert len({one.num_tokens for one in asked}) > 5
    assert 0 < sum(not one.is_compared for one in asked) < len(asked) / 6
    prompts = {one.prompt for one in asked}
    assert {tuple(prompt) for prompt in PROMPTS} < prompts
    beginnings = [one for one in prompts for other in prompts if one == other[: len(one)] != other]
    assert len(beginnings) >= 2 * len(PROMPTS)
    answers = [Answer(one, RequestRecord(0, 1, token_ids=[9] * one.num_tokens)) for one in asked]
    second = made.second_turns(answers, 10)
    longest = max(map(len, PROMPTS))
    assert {one.prompt[: len(one.prompt)] for one in second}.isdisjoint(prompts)
    assert max(len(one.prompt) for one in second) <= longest + 12 + 8
    again = workload().first_turns(40)
    assert again == asked


def test_many_requests_go_on_at_one_place() -> None:
    made = workload()
    at_place = made.at_place((3, 1, 4), 30)
    assert {one.prompt for one in at_place} == {(3, 1, 4)}
    # The target's own token, two that are proposed, and the bonus token.
    assert {one.num_tokens for one in at_place} == {4}
    assert {one.sampling.name for one in at_place} == {"as asked"}
    first = made.first_turns(0)
    answers = [Answer(one, RequestRecord(0, 1, token_ids=[9] * one.num_tokens)) for one in first]
    asked = made.second_turns(answers, 40, at_place, num_in_flight=6)
    assert sum(one.is_at_place and one.is_compared for one in asked) == 30
    # They come in groups of six among the others.
    groups = itertools.groupby(asked, operator.attrgetter("is_at_place"))
    lengths = [len(list(group)) for is_at_place, group in groups if is_at_place]
    assert len(lengths) > 2
    assert all(length % 6 == 0 for length in lengths)


def drawn_text(
    prompt: tuple[int, ...],
    widths: list[float],
    entropies: list[float],
    outcomes: Sequence[tuple[int, int]] = (),
) -> ScoredText:
    """A text of tokens 0, 1, and so on, with the outcomes of its iterations, where they are known."""
    request = PlannedRequest(prompt, samplings(DECODING)[0], len(widths), 0)
    record = RequestRecord(0, 1, num_tokens=len(widths), outcomes=list(outcomes))
    tokens = tuple(range(len(widths)))
    text: Any = SimpleNamespace(prompt=prompt, tokens=tokens, widths=np.array(widths))
    return ScoredText(Answer(request, record), text, np.array(entropies))


def test_the_place_is_where_a_proposal_was_rejected_and_the_second_token_is_most_open() -> None:
    widths, entropies = [1.0, 0.9, 1.0, 0.5], [0.0, 0.3, 2.0, 1.0]
    # Token 1 in place of the first of two proposed, and token 3 of the second.
    certain = drawn_text((7,), widths, entropies, [(2, 0), (2, 1)])
    assert choose_place([certain]) == (7, 0, 1)
    # Without knowing where, it may be any.
    assert choose_place([drawn_text((7,), widths, entropies)]) == (7, 0)
    other = drawn_text((8,), [1.0, 1.0], [0.0, 9.0], [(2, 0)])
    assert choose_place([certain, other, certain]) == (8,)
    assert choose_place([drawn_text((7,), widths, entropies, [(3, 3)])]) == (7,)

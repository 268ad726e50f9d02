"""Frames of a race: when they are due, what they leave behind, and a replay that is cut short."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from chain_pair import CHAIN, MARKED, TEXT, save_chain_pair
from harness.decoding.protocols import Iteration, Origin
from harness.experiments import compare_display
from harness.experiments.compare_display import LiveLane, show_race
from harness.experiments.compare_race import Lap
from harness.experiments.timing import Generation
from harness.results.compare_report import plain_console


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    return AutoTokenizer.from_pretrained(save_chain_pair(tmp_path_factory.mktemp("pair"))[0])


def iteration(tokens: list[int], origins: list[Origin]) -> Iteration:
    return Iteration([0], [tokens], [origins], [[]], [0])


@pytest.fixture
def lap(tokenizer) -> Lap:
    """The chain's speculative lap: half of 漢 comes with one iteration, the rest with the next."""
    tokens = [token for word in CHAIN[1:] for token in tokenizer(word)["input_ids"]]
    draft = Origin.DRAFT
    iterations = [
        iteration(tokens[:1], [Origin.TARGET]),
        iteration(tokens[1:2], [Origin.RECOVERED]),
        iteration(tokens[2:4], [draft, draft]),
        iteration(tokens[4:7], [draft, draft, Origin.BONUS]),
        iteration(tokens[7:], [draft, draft, draft, draft, Origin.BONUS]),
    ]
    decided = [1.0, 2.0, 3.0, 4.0, 5.0]
    return Lap("speculative", iterations, decided, Generation.of(iterations, 6, 1))


def screen(interactive: bool) -> tuple[io.StringIO, dict[str, object]]:
    file = io.StringIO()
    return file, {"file": file, "width": 100, "height": 24, "force_terminal": interactive, "color_system": None}


def test_without_a_terminal_only_the_end_is_printed(tokenizer, lap: Lap) -> None:
    file, arguments = screen(interactive=False)
    with LiveLane(plain_console(**arguments), "speculative", tokenizer, [1]) as lane:
        assert not lane.wants_to_look(1e9)
        lane.finish(lap)
    assert file.getvalue().count(MARKED) == 1
    assert "13" not in file.getvalue().splitlines()[0]
    assert "12 tokens · 6.00 s · 2.0 tokens/s · first token 1000.0 ms" in file.getvalue()


def test_the_first_token_is_due_at_once_and_half_a_character_waits(
    tokenizer, lap: Lap, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, arguments = screen(interactive=True)
    monkeypatch.setattr(compare_display, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    with LiveLane(plain_console(**arguments), "speculative", tokenizer, [1]) as lane:
        assert lane.wants_to_look(100.0)
        lane.look(lap.iterations[:1], lap.decided[:1])
        assert not lane.wants_to_look(100.0)
        assert lane.wants_to_look(100.11)
        lane.look(lap.iterations[:3], lap.decided[:3])
    assert "one [two]" in file.getvalue()
    # 漢 was not whole when the generation was broken off; what there was of it shows then, and not before.
    *frames, last = file.getvalue().split("speculative")
    assert "\N{REPLACEMENT CHARACTER}" in last
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(frames)


def test_a_replay_that_is_cut_short_ends_with_both_texts(tokenizer, lap: Lap, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    file, arguments = screen(interactive=True)
    monkeypatch.setattr(compare_display, "time", SimpleNamespace(perf_counter=lambda: 0.0, sleep=interrupt))
    regular = Lap("regular", lap.iterations, lap.decided, lap.generation)
    show_race(plain_console(**arguments), [regular, lap], tokenizer, [1])
    last = file.getvalue().splitlines()[-6:]
    assert any(TEXT.split("字")[0].strip() in line and MARKED.split("字")[0].strip() in line for line in last), last

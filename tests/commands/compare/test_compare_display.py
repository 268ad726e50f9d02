"""The screen of a race: colours and marks, texts that would steer the terminal, narrow screens, frames, the replay."""

from __future__ import annotations

import io
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer

from chain_pair import CHAIN, MARKED, save_chain_pair
from harness.commands.compare import display as compare_display
from harness.commands.compare.display import Lane, print_lanes, show_race, view
from harness.commands.compare.tables import rejections
from harness.engines.arrivals import Arrival, Origin
from harness.engines.protocol import Answered
from harness.reporting.table import Line
from harness.reporting.terminal import plain_console, print_document
from harness.results.acceptance import Rejection


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(save_chain_pair(tmp_path_factory.mktemp("pair"))[0])


def lap_of(arm: str, arrivals: Sequence[Arrival], seconds: float) -> Answered:
    return Answered(requests=[], seconds=seconds, arrivals=arrivals, arm=arm)


@pytest.fixture
def lap(tokenizer: Any) -> Answered:
    """The chain's speculative lap: half of 漢 comes with one iteration, the rest with the next."""
    tokens = [token for word in CHAIN[1:] for token in tokenizer(word)["input_ids"]]
    draft = Origin.DRAFT
    arrivals = [
        Arrival(0, 1.0, tokens[:1], [Origin.TARGET]),
        Arrival(0, 2.0, tokens[1:2], [Origin.RECOVERED]),
        Arrival(0, 3.0, tokens[2:4], [draft, draft]),
        Arrival(0, 4.0, tokens[4:7], [draft, draft, Origin.BONUS]),
        Arrival(0, 5.0, tokens[7:], [draft, draft, draft, draft, Origin.BONUS]),
    ]
    return lap_of("speculative", arrivals, 6.0)


def console(interactive: bool, width: int = 100, **arguments: Any) -> Console:
    options = {"file": io.StringIO(), "width": width, "height": 24, "force_terminal": interactive}
    return plain_console(**options | arguments)


def printed(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


class Words:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(self.words[token] for token in tokens)


def lane_of(screen: Console, words: dict[str, Origin], arm: str = "speculative") -> Lane:
    """A lane in which each word is a token of its origin."""
    lane = Lane(screen, arm, Words(list(words)), [])  # type: ignore[arg-type]
    lane.show(lap_of(arm, [Arrival(0, 1.0, range(len(words)), list(words.values()))], 1.0))
    lane.end()
    return lane


WORDS = {
    " one": Origin.TARGET,
    " two": Origin.RECOVERED,
    "漢": Origin.DRAFT,
    "\n": Origin.RECOVERED,
    " end": Origin.BONUS,
}


def test_marks_replace_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, coloured = (console(True, color_system=system) for system in (None, "truecolor"))
    for screen in (plain, coloured):
        screen.print(view([lane_of(screen, WORDS)]))
    assert "\n one [two]漢[⏎]\n {end}\n" in printed(plain)
    assert "accepted draft · [recovered] · {bonus}" in printed(plain)
    assert " \x1b[4;38;2;213;94;0mtwo" in printed(coloured)
    assert "[recovered]" not in printed(coloured)


def test_a_model_cannot_steer_the_terminal() -> None:
    screen = console(False)
    words = {"\x1b[2J\x07a\r\nb\x9b1m\x7f [bold]:smile:": Origin.TARGET}
    screen.print(view([lane_of(screen, words, "regular")]))
    # The regular arm has no legend.
    assert printed(screen).startswith("regular\n␛[2J␇a\nb␡1m␡ [bold]:smile:\n1 token")


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_growing_lane_fits_its_screen(width: int) -> None:
    """Wide characters count twice; the newest text is what shows."""
    words = {f" 漢字{number}שלום": Origin.DRAFT for number in range(200)}
    for count in (1, 2):
        screen = console(False, width)
        screen.print(view([lane_of(screen, words)] * count, 24))
        lines = printed(screen).splitlines()
        assert len(lines) <= 24
        assert any("199" in line for line in lines)
        assert max(Text(line).cell_len for line in lines) <= width


def test_half_a_character_waits(tokenizer: Any, lap: Answered) -> None:
    """漢 is not whole after three arrivals; what there is of it shows when nothing follows."""
    screen = console(True, color_system=None)
    lane = Lane(screen, "speculative", tokenizer, [1])
    lane.show(lap_of("speculative", lap.arrivals[:3], 3.0))
    screen.print(view([lane]))
    assert "\N{REPLACEMENT CHARACTER}" not in printed(screen)
    print_lanes([lane])
    assert "\N{REPLACEMENT CHARACTER}" in printed(screen)


def test_a_replay_that_is_cut_short_ends_with_both_texts(
    tokenizer: Any, lap: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    screen = console(True, color_system=None)
    monkeypatch.setattr(
        compare_display, "time", SimpleNamespace(perf_counter=lambda: 0.0, sleep=interrupt)
    )
    show_race(screen, [lap_of("regular", lap.arrivals, 6.0), lap], tokenizer, [1])
    last = printed(screen).splitlines()[-7:]
    start = MARKED.split("字")[0].strip()
    assert any(line.count(start) == 2 for line in last), last


def test_a_replay_shows_what_was_decided_by_then(tokenizer: Any, lap: Answered) -> None:
    lane = Lane(console(False), "speculative", tokenizer, [1])
    shown = []
    for at in (0.5, 1.0, 3.5, 100.0):
        lane.show(lap, at)
        shown.append((lane.num_tokens, str(lane.clock())))
    assert shown == [
        (0, "0 tokens · 0.50 s"),
        (1, "1 token · 1.00 s · 1.0 tokens/s · first token 1000.0 ms"),
        (4, "4 tokens · 3.50 s · 1.1 tokens/s · first token 1000.0 ms"),
        (12, "12 tokens · 6.00 s · 2.0 tokens/s · first token 1000.0 ms"),
    ]


def test_rejections_show_spaces_and_cannot_steer_the_terminal() -> None:
    screen = console(False)
    print_document(rejections([Rejection(7, " won\x1b[2J", 0.25, None, "\n")]), screen)
    for cell in ('7   " won␛[2J"', "0.250", '"⏎"'):
        assert cell in printed(screen)
    assert [part.text for part in rejections([]) if isinstance(part, Line)] == [
        "No draft token was rejected."
    ]

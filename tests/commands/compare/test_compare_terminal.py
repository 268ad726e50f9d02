"""`compare` as a user sees it: on a real terminal and through pipes; colours, narrow screens, the replay."""

import io
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer

from chain_pair import CHAIN, MARKED, TEXT, save_chain_pair
from harness.commands.compare import display as compare_display
from harness.commands.compare.display import Lane, show_race, view
from harness.commands.compare.race import Rejection
from harness.commands.compare.tables import rejections
from harness.engines.arrivals import Arrival, Origin
from harness.engines.protocol import Answered
from harness.reporting.table import Line
from harness.reporting.terminal import plain_console, print_document
from in_process import Harness, Outcome
from terminal import CTRL_C, CTRL_D, ENTER, UP, Terminal

PAIR = ("model=./chain", "draft=./chain_draft")
# Okabe and Ito's bluish green, vermilion and reddish purple.
ACCEPTED, RECOVERED, BONUS = "009e73", "d55e00", "cc79a7"

# The welcome and the first prompt, which is drawn once the terminal is in raw mode: a key such as Ctrl-D that comes
# earlier is lost.
READY = "Ctrl-D ends. >"

Open = Callable[..., Terminal]
Pipe = Callable[..., Outcome]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compare")
    save_chain_pair(directory, context=100_000)
    return directory


@pytest.fixture
def open_terminal(directory: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(*arguments: str, **options: Any) -> Terminal:
        opened.append(Terminal("compare", *arguments, directory=directory, **options))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.kill()


@pytest.fixture
def pipe(harness: Harness, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """Runs the command in this process; stdin and stdout are no terminals."""

    def run(*arguments: str, lines: str = "", pair: Sequence[str] = PAIR, code: int = 0) -> Outcome:
        monkeypatch.chdir(directory)
        typed = io.BytesIO(lines.encode(errors="surrogateescape"))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed, "utf-8"))
        return harness("compare", *pair, *arguments, code=code)

    return run


def ask(terminal: Terminal, line: str, expected: str, times: int = 1) -> None:
    terminal.type(line + ENTER)
    terminal.wait_for(expected, times)


def test_a_session(open_terminal: Open, directory: Path) -> None:
    """A race, its colours, settings, what is refused, and the end."""
    terminal = open_terminal(*PAIR, "view=log")
    terminal.wait_for(READY)
    assert "Loading weights" not in terminal.text, "the bar of another library"
    first, *_ = terminal.text.splitlines()
    assert first.startswith("chain with draft chain_draft · "), "nothing of the line that lives"
    ask(terminal, "Banana", "identical, token for token. >")
    assert terminal.text.count(f"\n{TEXT}\n13 tokens") == 2  # as it is: origins are in the colours
    for word, colour in [("漢", ACCEPTED), ("four", BONUS), ("one", "default")]:
        assert terminal.colours(word) == {colour}, word

    # An empty line is asked again.
    ask(terminal, "", "identical, token for token. > >")

    # Up finds the last line; Ctrl-C drops it, and Ctrl-D ends.
    num_shown = terminal.text.count("Banana")
    terminal.type(UP)
    terminal.wait_for("Banana", num_shown + 1)
    terminal.type(CTRL_C)
    ask(terminal, "Sahara", "identical, token for token. >", 2)
    terminal.type(CTRL_D)
    assert terminal.wait_for_end() == 0
    assert "Traceback" not in terminal.text

    rows = pd.read_csv(directory / "results" / "compare.csv")
    assert rows["prompt"].tolist()[-2:] == ["Banana", "Sahara"]
    assert rows["identical"].tolist()[-2:] == [True, True]
    assert rows["run"].tail(2).nunique() == 1
    assert rows["speculative_completion"].tolist()[-1] == TEXT


@pytest.mark.slow
def test_ctrl_c_stops_a_generation_and_keeps_models(open_terminal: Open, directory: Path) -> None:
    terminal = open_terminal(*PAIR, "decoding.ignore_eos=true", "decoding.max_new_tokens=2000")
    terminal.wait_for(READY)
    ask(terminal, "Banana", "decoding: regular")
    terminal.type(CTRL_C)
    terminal.wait_for("Stopped. The models stay loaded; Ctrl-D ends. >")
    ask(terminal, "Sahara", "identical, token for token. >")
    terminal.type(CTRL_C)  # on an empty line
    assert terminal.wait_for_end() == 0
    rows = pd.read_csv(directory / "results" / "compare.csv")
    assert rows["status"].tolist()[-2:] == ["interrupted", "ok"]
    assert rows["view"].tolist()[-2:] == ["race"] * 2
    assert pd.isna(rows["speedup"].tolist()[-2])
    assert rows["run"].tail(2).nunique() == 1


def test_a_closed_window_leaves_the_row_of_a_race(open_terminal: Open, directory: Path) -> None:
    """The kernel sends SIGHUP then."""
    terminal = open_terminal(*PAIR, "decoding.ignore_eos=true", "decoding.max_new_tokens=90000")
    terminal.wait_for(READY)
    ask(terminal, "Banana", "decoding: regular")
    assert terminal.close_window() == 130
    last = pd.read_csv(directory / "results" / "compare.csv").iloc[-1]
    assert (last["status"], last["error"]) == ("interrupted", "stopped by SIGHUP")


def test_forty_columns_without_colour(open_terminal: Open) -> None:
    """A small screen, marks for colours, a paste of several lines, and every rejection."""
    terminal = open_terminal(*PAIR, columns=40, environment={"NO_COLOR": "1"})
    terminal.wait_for("view=log")
    terminal.wait_for(READY)
    # A terminal wraps a paste in these; the line ends in it send nothing.
    terminal.type("\x1b[200~Ghana\nMalta\x1b[201~")
    terminal.wait_for("… Malta")
    ask(terminal, "", "identical, token for token. >")
    assert f"{MARKED.replace(' {end}', '')}" in terminal.text
    assert "nothing drafted · accepted draft · [recovered]" in terminal.prose
    assert max(map(len, terminal.text.splitlines())) <= 40

    assert '1 " won"' in terminal.prose
    assert "0.000" in terminal.text
    assert "1.000" in terminal.text
    terminal.type(CTRL_D)
    terminal.wait_for("Saved")
    assert terminal.wait_for_end() == 0


def test_the_prompt_setting_is_always_text(pipe: Pipe) -> None:
    prompt = "8 * [12], ${x} = 'a' \\ \"b\"\n(a"
    assert f"> {prompt}\n" in pipe(f"prompt={prompt}").stdout


def test_piped_lines(pipe: Pipe) -> None:
    """One prompt per line; one that fails does not stop the others, and the exit code shows it."""
    # A blank line does not count; a byte that is no text becomes a replacement character.
    result = pipe(lines=f"Banana\n\n{'a' * 100_000}\nma\udcffla\n{'a' * 600}\nSahara", code=1)
    assert result.stdout.count(MARKED) == 4
    assert "> Banana\n" in result.stdout
    assert "\x1b" not in result.stdout
    assert "harness: prompt: it has 1" in result.stderr
    assert result.stderr.splitlines()[-1] == "harness: 1 of 5 lines failed"


def test_without_a_prompt_that_can_be_answered_nothing_is_printed(pipe: Pipe) -> None:
    for arguments, expected in (
        ([], "prompt: must be given without a terminal"),
        (["prompt=Sahara", "decoding.max_new_tokens=100000"], "prompt: it has 6 tokens"),
    ):
        outcome = pipe(*arguments, code=2)
        assert outcome.complaint.startswith(expected)
        assert outcome.stdout == ""


def test_without_a_draft_and_with_one_that_always_agrees(pipe: Pipe) -> None:
    alone = pipe("draft=none", "prompt=Banana")
    assert "regular\n" in alone.stdout
    assert "speculative" not in alone.stdout
    shutil.copytree("chain", "twin")
    own = pipe("draft=./twin", "prompt=Banana", "view=log")
    assert "100 % of the draft tokens accepted" in own.stdout
    assert "No draft token was rejected." in own.stdout


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
    lane = Lane(screen, arm, Words(list(words)), [])
    lane.show(lap_of(arm, [Arrival(0, 1.0, range(len(words)), list(words.values()))], 1.0))
    lane.end()
    return lane


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


def test_a_replay_that_is_cut_short_ends_with_both_texts(
    tokenizer: Any, lap: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    screen = console(True, color_system=None)
    clock = SimpleNamespace(perf_counter=lambda: 0.0, sleep=interrupt)
    monkeypatch.setattr(compare_display, "time", clock)
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
    lines = [part.text for part in rejections([]) if isinstance(part, Line)]
    assert lines == ["No draft token was rejected."]

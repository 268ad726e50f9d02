"""Draws both arms on the screen: their texts, in which a colour shows the origin of each token, and their race."""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.engines.arrivals import Origin
from harness.engines.protocol import Answered
from harness.engines.tokenizer import Detokenizer, Tokenizer
from harness.reporting.table import visible

# A replay lasts as long as the slower arm took, within these limits. Outside the limits, both arms are slowed down or
# sped up by one factor.
_SHORTEST_REPLAY_S = 3.0
_LONGEST_REPLAY_S = 15.0
_FRAMES_PER_S = 10

# Characters between two columns of text.
_GUTTER = 3


# Colours from Okabe and Ito's palette, which people with the common kinds of colour-blindness can distinguish.
# Underlined and bold type help, too.
_STYLES = {
    Origin.TARGET: "",
    Origin.DRAFT: "#009E73",
    Origin.RECOVERED: "underline #D55E00",
    Origin.BONUS: "bold #CC79A7",
}
# The marks around a token if there is no colour.
_MARKS = {Origin.RECOVERED: ("[", "]"), Origin.BONUS: ("{", "}")}
_LEGEND = {
    Origin.TARGET: "nothing drafted",
    Origin.DRAFT: "accepted draft",
    Origin.RECOVERED: "recovered",
    Origin.BONUS: "bonus",
}


class Lane:
    """One arm on the screen: its text and its clock, which grow with the tokens that arrive.

    Args:
        prompt: token ids of the prompt. They determine how the first token is written: with or without a space.
        legend: whether to explain the colours; false if the arm does not report the origins of tokens. The regular arm
            never has a legend, because all its tokens are the target's.
    """

    def __init__(
        self,
        console: Console,
        arm: str,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        legend: bool = True,
    ) -> None:
        self.console = console
        self.num_tokens = 0
        # Marks show the origin of tokens where there is no colour: with NO_COLOR, in a pipe, and on some terminals.
        self._marks = console.no_color or console.color_system is None
        self.heading = Text(arm, style="bold")
        self.legend: Text | None = None
        if legend and arm != "regular":
            names = [_token(name, origin, self._marks) for origin, name in _LEGEND.items()]
            self.legend = Text(" · ", style="dim").join(names)
        self._text = Text()
        self._seconds = 0.0
        self._seconds_to_first_token: float | None = None
        self._detokenizer = Detokenizer(tokenizer, prompt)
        # The number of arrivals that are shown, and the origin of the last token shown.
        self._num_shown = 0
        self._origin = Origin.TARGET

    def show(self, answered: Answered, at: float = math.inf) -> None:
        """Show the tokens that arrived in the first `at` seconds of an answer, which has a single request. Later calls
        must be about the same answer, with an `at` that is not earlier.
        """
        count = bisect_right(answered.arrivals, at, key=attrgetter("seconds"))
        for arrival in answered.arrivals[self._num_shown : count]:
            for token, origin in zip(arrival.tokens, arrival.origins, strict=True):
                self.num_tokens += 1
                self._origin = origin
                self._append(self._detokenizer.add(token) or "")
        self._num_shown = count
        self._seconds = min(at, answered.seconds)
        self._seconds_to_first_token = answered.arrivals[0].seconds if count else None
        if at >= answered.seconds:
            # The token ids of a server that sends only text are guessed by encoding the text, and come at the end. The
            # record has the server's own number of tokens, and the time of the first.
            for request in answered.requests:
                self.num_tokens = request.num_tokens
                if request.arrivals:
                    self._seconds_to_first_token = request.arrivals[0]

    def end(self) -> None:
        """Show an incomplete character at the end of the text: no further token will complete it."""
        self._append(self._detokenizer.flush())
        self._text.rstrip()

    def text(self, width: int, height: int | None) -> RenderableType:
        """The last lines of the text that fit into this many characters and lines; the whole text if height is None."""
        if height is None:
            return self._text
        lines = self._text.wrap(self.console, width)
        return Group(*lines[-max(1, height) :])

    def clock(self) -> Text:
        """The number of tokens, the time and, if known, the rate and the time to the first token."""
        tokens = "token" if self.num_tokens == 1 else "tokens"
        parts = [f"{self.num_tokens} {tokens}", f"{self._seconds:.2f} s"]
        if self.num_tokens and self._seconds:
            parts.append(f"{self.num_tokens / self._seconds:.1f} tokens/s")
        if self._seconds_to_first_token is not None:
            parts.append(f"first token {1000 * self._seconds_to_first_token:.1f} ms")
        return Text(" · ".join(parts), style="dim")

    def _append(self, text: str) -> None:
        """Append text in the style of the last token's origin."""
        self._text.append_text(_token(text, self._origin, self._marks))


def view(lanes: Sequence[Lane], height: int | None = None) -> RenderableType:
    """Lanes side by side.

    Args:
        height: height of the screen in lines, which limits the texts to their last lines; None to show them whole.
    """
    console = lanes[0].console
    width = (console.width - _GUTTER * (len(lanes) - 1)) // len(lanes)
    clocks = [lane.clock() for lane in lanes]
    legends = [lane.legend for lane in lanes if lane.legend is not None]
    text_height = None
    if height is not None:
        clock_height = max(len(clock.wrap(console, width)) for clock in clocks)
        legend_height = sum(len(legend.wrap(console, console.width)) for legend in legends)
        # One line is for the headings, and one for the cursor.
        text_height = height - clock_height - legend_height - 2
    texts = [lane.text(width, text_height) for lane in lanes]
    headings = [lane.heading for lane in lanes]
    if len(lanes) == 1:
        # A table would break the lines of the text, which should stay whole in a pipe.
        return Group(*headings, *texts, *clocks, *legends)
    table = Table.grid(padding=(0, _GUTTER, 0, 0))
    for _ in lanes:
        table.add_column(width=width)
    for cells in (headings, texts, clocks):
        table.add_row(*cells)
    return Group(table, *legends)


def print_lanes(lanes: Sequence[Lane]) -> None:
    """Print the whole texts of lanes, so that they stay on the screen."""
    for lane in lanes:
        lane.end()
    if lanes:
        console = lanes[0].console
        console.print(view(lanes), soft_wrap=not console.is_terminal and len(lanes) == 1)


def show_race(
    console: Console,
    answers: Sequence[Answered],
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    legend: bool = True,
) -> None:
    """Show both arms side by side. On a terminal this is a replay that keeps the ratio of their times; Ctrl-C skips to
    its end.

    Args:
        answers: the answer of each arm, one or two.
        prompt: token ids of the prompt.
        legend: as for `Lane`.
    """
    lanes = [Lane(console, answered.arm, tokenizer, prompt, legend) for answered in answers]

    def show(at: float = math.inf) -> None:
        for lane, answered in zip(lanes, answers, strict=True):
            lane.show(answered, at)

    if console.is_interactive and len(answers) > 1:
        longest = max(answered.seconds for answered in answers)
        shown_s = min(max(longest, _SHORTEST_REPLAY_S), _LONGEST_REPLAY_S)
        speed = longest / shown_s
        replayed = f"Replayed at {speed:.3g} times real speed."
        console.print(f"Both were measured, one after the other. {replayed}", style="dim")
        began = time.perf_counter()

        def frame() -> RenderableType:
            show(min((time.perf_counter() - began) * speed, longest))
            return view(lanes, console.height)

        # rich draws the frames in a thread of its own, so Ctrl-C interrupts none of them.
        screen = Live(
            get_renderable=frame,
            console=console,
            refresh_per_second=_FRAMES_PER_S,
            transient=True,
            vertical_overflow="crop",
        )
        with screen, contextlib.suppress(KeyboardInterrupt):
            time.sleep(shown_s)
    show()
    print_lanes(lanes)


def _token(text: str, origin: Origin, marks: bool) -> Text:
    """A token in the style of its origin or, if `marks`, between marks that show the origin.

    Spaces around a word stay outside the marks, so that words remain apart: ` the` -> ` [the]`.
    """
    text = visible(text)
    word = text.strip()
    start = text.index(word)
    space_before = text[:start]
    space_after = text[start + len(word) :]
    if not marks:
        return Text.assemble(space_before, (word, _STYLES[origin]), space_after)
    if origin not in _MARKS or not text:
        return Text(text)
    opening, closing = _MARKS[origin]
    if word:
        return Text(f"{space_before}{opening}{word}{closing}{space_after}")
    # A token that consists of spaces is shown as a symbol.
    name = "⏎" if "\n" in text else "␣"
    return Text(f"{opening}{name}{closing}{text}")

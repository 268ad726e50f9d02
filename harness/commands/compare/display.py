"""A race on the screen: texts that grow, every token coloured by its origin, and the replay of both
arms.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.engines.detokenizer import Detokenizer
from harness.engines.iteration import Origin
from harness.engines.timing import FRAME_S, Generation
from harness.engines.tokenizer import Tokenizer
from harness.reporting.table import visible
from harness.reporting.terminal import LastingConsole

# A replay is slowed down or sped up into this many seconds, both arms alike.
_SHORTEST_REPLAY_S = 3.0
_LONGEST_REPLAY_S = 15.0

# Below this width two columns of text are too narrow to read; they are then one above the other.
_SIDE_BY_SIDE = 60
_GUTTER = 3


# Colours of Okabe and Ito's palette, which the common kinds of colour-blindness keep apart;
# underline and bold help.
_STYLES = {
    Origin.TARGET: "",
    Origin.DRAFT: "#009E73",
    Origin.RECOVERED: "underline #D55E00",
    Origin.BONUS: "bold #CC79A7",
}
# What stands around a token where there is no colour.
_MARKS = {Origin.RECOVERED: ("[", "]"), Origin.BONUS: ("{", "}")}
_LEGEND = {Origin.DRAFT: "accepted draft", Origin.RECOVERED: "recovered", Origin.BONUS: "bonus"}


def plain_console(**arguments: Any) -> LastingConsole:
    """A console that prints text as it is: no markup, no emoji codes, no highlighting."""
    # Rich obeys a NO_COLOR that is set but empty; by https://no-color.org an empty one means
    # nothing.
    no_color = bool(os.environ.get("NO_COLOR"))
    return LastingConsole(
        highlight=False, markup=False, emoji=False, no_color=no_color, **arguments
    )


class Lane:
    """One arm on the screen: its text and its clock, filled from the arm's records.

    Args:
        prompt: token ids, which decide how the first token is written.
        legend: whether to show what the colours mean, because records have the origins of tokens.
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
        # There is no colour with NO_COLOR, in a pipe, and on some terminals.
        self._marks = console.no_color or console.color_system is None
        self._heading = Text(arm, style="bold")
        if legend and arm != "regular":
            names = [_token(name, origin, self._marks) for origin, name in _LEGEND.items()]
            separator = Text(" · ", style="dim")
            self._heading = Text.assemble(self._heading, "  ", separator.join(names))
        self._text = Text()
        self._seconds = 0.0
        self._seconds_to_first_token: float | None = None
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._num_shown = 0
        self._origin = Origin.TARGET

    def show(self, lap: Generation, at: float = math.inf) -> None:
        """Show the tokens that were decided in the first `at` seconds of the lap."""
        count = bisect_right(lap.decided, at)
        for iteration in lap.iterations[self._num_shown : count]:
            for token, origin in zip(iteration.tokens[0], iteration.origins[0], strict=True):
                self.num_tokens += 1
                self._origin = origin
                self._append(self._detokenizer.add(token) or "")
        self._num_shown = count
        self._seconds = min(at, lap.seconds)
        self._seconds_to_first_token = lap.decided[0] if count else None

    def end(self) -> None:
        """Show half a character that still waits for its other half: nothing follows."""
        self._append(self._detokenizer.flush())
        self._text.rstrip()

    def parts(
        self, width: int, height: int | None
    ) -> tuple[RenderableType, RenderableType, RenderableType]:
        """Heading, text and clock.

        Args:
            width, height: of the lane in characters. Of the text, the last lines that fit are
                shown; all of it if the height is None.
        """
        clock = self._clock()
        if height is None:
            return self._heading, self._text, clock
        heading_lines = self._heading.wrap(self.console, width)
        clock_lines = clock.wrap(self.console, width)
        room = max(1, height - len(heading_lines) - len(clock_lines))
        lines = self._text.wrap(self.console, width)
        return self._heading, Group(*lines[-room:]), clock

    def _clock(self) -> Text:
        """How many tokens there are, and in what time."""
        tokens = "token" if self.num_tokens == 1 else "tokens"
        parts = [f"{self.num_tokens} {tokens}", f"{self._seconds:.2f} s"]
        if self.num_tokens and self._seconds:
            parts.append(f"{self.num_tokens / self._seconds:.1f} tokens/s")
        if self._seconds_to_first_token is not None:
            parts.append(f"first token {1000 * self._seconds_to_first_token:.1f} ms")
        return Text(" · ".join(parts), style="dim")

    def _append(self, text: str) -> None:
        self._text.append_text(_token(text, self._origin, self._marks))


def view(lanes: Sequence[Lane], height: int | None = None) -> RenderableType:
    """Lanes side by side, or one above the other on a narrow screen.

    Args:
        height: of the screen in lines; None to show the whole text.
    """
    num_lanes = len(lanes)
    width = lanes[0].console.width
    if num_lanes == 1 or width < _SIDE_BY_SIDE:
        # The last line is the cursor's.
        lane_height = None if height is None else (height - 1) // num_lanes
        parts: list[RenderableType] = []
        for lane in lanes:
            parts += lane.parts(width, lane_height)
        return Group(*parts)
    lane_width = (width - _GUTTER * (num_lanes - 1)) // num_lanes
    # One arm's heading and clock may take a line more than the other's.
    lane_height = None if height is None else height - 3
    columns = [lane.parts(lane_width, lane_height) for lane in lanes]
    table = Table.grid(padding=(0, _GUTTER, 0, 0))
    for _ in lanes:
        table.add_column(width=lane_width)
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    return table


@contextlib.contextmanager
def live(lane: Lane) -> Iterator[Callable[[Generation], None] | None]:
    """Yields the function that draws the lane while its arm decodes, None without a terminal.

    At the end the whole text stays on the screen, also of a generation that is broken off.
    """
    try:
        if not lane.console.is_interactive:
            yield None
            return
        with _screen(lane.console) as draw:
            draw([lane])

            def draw_lap(lap: Generation) -> None:
                lane.show(lap)
                draw([lane])

            yield draw_lap
    finally:
        lane.end()
        if lane.num_tokens:
            lane.console.print(view([lane]), soft_wrap=not lane.console.is_terminal)


def show_race(
    console: Console,
    laps: Sequence[Generation],
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    legend: bool = True,
) -> None:
    """Both arms side by side, in proportion: on a terminal as a replay. Ctrl-C jumps to its end."""
    lanes = [Lane(console, lap.arm, tokenizer, prompt, legend) for lap in laps]

    def show(at: float = math.inf) -> None:
        for lane, lap in zip(lanes, laps, strict=True):
            lane.show(lap, at)

    if console.is_interactive:
        longest = max(lap.seconds for lap in laps)
        shown_s = min(max(longest, _SHORTEST_REPLAY_S), _LONGEST_REPLAY_S)
        speed = longest / shown_s
        in_words = "at real speed"
        if speed != 1:
            in_words = f"{speed:.2g}× faster" if speed > 1 else f"{1 / speed:.2g}× slower"
        console.print(f"Both were measured, one after the other. Replayed {in_words}.", style="dim")
        with _screen(console) as draw, contextlib.suppress(KeyboardInterrupt):
            began = time.perf_counter()
            at = 0.0
            while at < longest:
                at = min((time.perf_counter() - began) * speed, longest)
                show(at)
                draw(lanes)
                time.sleep(FRAME_S)
    show()
    for lane in lanes:
        lane.end()
    console.print(view(lanes))


@contextlib.contextmanager
def _screen(console: Console) -> Iterator[Callable[[Sequence[Lane]], None]]:
    """Yields the function that draws lanes in place; they are gone at the end of the block."""
    with Live(
        console=console, auto_refresh=False, transient=True, vertical_overflow="crop"
    ) as screen:
        yield lambda lanes: screen.update(view(lanes, console.height), refresh=True)


def _token(text: str, origin: Origin, marks: bool) -> Text:
    """A token in the style of its origin, or between the marks of its origin.

    Space around a word stays outside of the marks, so that words stay apart: ` the` -> ` [the]`.
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
    # A token of nothing but space is named.
    name = "⏎" if "\n" in text else "␣"
    return Text(f"{opening}{name}{closing}{text}")

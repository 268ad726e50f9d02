"""A race on the screen: an arm's text while it grows, and the replay of both. All of it while no clock runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from transformers import PreTrainedTokenizerBase

from harness.decoding.protocols import Iteration
from harness.experiments.compare_race import Lap
from harness.models.detokenizer import Detokenizer
from harness.results.compare_report import Lane, Piece, finished, marks_instead_of_colours, running, side_by_side

# Seconds between two frames; and how many times its own cost a frame stays on the screen at least, so that a text that
# is long or a terminal that is slow takes no more than a tenth of the wait.
_FRAME_S = 0.1
_COST_FACTOR = 9.0

# A replay is slowed down or sped up into this many seconds, both arms alike.
_SHORTEST_REPLAY_S, _LONGEST_REPLAY_S = 3.0, 15.0


class LaneWriter:
    """Fills a lane from an arm's records.

    Attributes:
        lane: what is shown.
    """

    def __init__(self, arm: str, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self.lane = Lane(arm, origins=arm != "regular")
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._num_written = 0

    def write(self, iterations: Sequence[Iteration], decided: Sequence[float]) -> None:
        """Bring the lane up to these iterations, which begin with those it has already."""
        lane = self.lane
        for iteration in iterations[self._num_written :]:
            for token, origin in zip(iteration.tokens[0], iteration.origins[0], strict=True):
                lane.num_tokens += 1
                if text := self._detokenizer.add(token):
                    lane.pieces.append(Piece(text, origin))
        self._num_written = len(iterations)
        if iterations:
            lane.seconds, lane.seconds_to_first_token = decided[-1], decided[0]

    def end(self, seconds: float | None = None) -> Lane:
        """The lane when nothing follows, after `seconds` on the arm's clock."""
        if text := self._detokenizer.flush():
            self.lane.pieces.append(Piece(text, self.lane.pieces[-1].origin if self.lane.pieces else "target"))
        if seconds is not None:
            self.lane.seconds = seconds
        return self.lane


class LiveLane:
    """Shows one arm while it decodes: a `Watcher`, and a context whose end leaves the text on the screen.

    Drawn in place on a terminal; elsewhere only the finished text is printed. A generation that is broken off leaves
    what there was of it.
    """

    def __init__(self, console: Console, arm: str, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._console = console
        self._marks = marks_instead_of_colours(console)
        self._writer = LaneWriter(arm, tokenizer, prompt)
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._next_frame = 0.0
        self._seconds: float | None = None

    def __enter__(self) -> LiveLane:
        if self._console.is_interactive:
            self._live.start()
            self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()
        lane = self._writer.end(self._seconds)
        if lane.num_tokens:
            self._console.print(finished(lane, self._marks), soft_wrap=not self._console.is_terminal)

    def wants_to_look(self, now: float) -> bool:
        """Whether a frame is due: the first token at once, then so many frames a second."""
        return now >= self._next_frame and self._console.is_interactive

    def look(self, iterations: Sequence[Iteration], seconds: Sequence[float]) -> None:
        """Draw a frame."""
        began = time.perf_counter()
        self._writer.write(iterations, seconds)
        self._draw()
        ended = time.perf_counter()
        self._next_frame = ended + max(_FRAME_S, _COST_FACTOR * (ended - began))

    def finish(self, lap: Lap) -> None:
        """Take over what was decided since the last frame."""
        self._writer.write(lap.iterations, lap.decided)
        self._seconds = lap.generation.seconds

    def _draw(self) -> None:
        width, height = self._console.size
        frame = running(self._writer.lane, width, height, self._marks, self._console)
        self._live.update(frame, refresh=True)


def show_race(console: Console, laps: Sequence[Lap], tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
    """Both arms side by side, in real proportion: on a terminal as a replay. Ctrl-C jumps to its end."""
    marks = marks_instead_of_colours(console)
    writers = [LaneWriter(lap.arm, tokenizer, prompt) for lap in laps]
    if console.is_interactive:
        longest = max(lap.generation.seconds for lap in laps)
        shown_s = min(max(longest, _SHORTEST_REPLAY_S), _LONGEST_REPLAY_S)
        pace = "at real speed"
        if longest != shown_s:
            pace = f"{shown_s / longest:.2g}× slower" if longest < shown_s else f"{longest / shown_s:.2g}× faster"
        console.print(f"Both were measured, one after the other. Replayed {pace}.", style="dim")
        live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        with live, contextlib.suppress(KeyboardInterrupt):
            _replay(console, live, laps, writers, longest / shown_s, marks)
    lanes = []
    for writer, lap in zip(writers, laps, strict=True):
        writer.write(lap.iterations, lap.decided)
        lanes.append(writer.end(lap.generation.seconds))
    # Whole texts: as many lines as they take.
    console.print(side_by_side(lanes, console.width, 1_000_000, marks, console))


def _replay(
    console: Console, live: Live, laps: Sequence[Lap], writers: Sequence[LaneWriter], speed: float, marks: bool
) -> None:
    longest = max(lap.generation.seconds for lap in laps)
    began, at = time.perf_counter(), 0.0
    while at < longest:
        at = min((time.perf_counter() - began) * speed, longest)
        for lap, writer in zip(laps, writers, strict=True):
            count = sum(decided <= at for decided in lap.decided)
            writer.write(lap.iterations[:count], lap.decided)
            writer.lane.seconds = min(at, lap.generation.seconds)
            writer.lane.seconds_to_first_token = lap.decided[0] if count else None
        width, height = console.size
        live.update(side_by_side([writer.lane for writer in writers], width, height, marks, console), refresh=True)
        time.sleep(_FRAME_S)

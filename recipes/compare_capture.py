"""Records `harness compare` in a terminal, and makes an animated picture of it for the README: docs/compare.svg.

    python recipes/compare_capture.py [--prompt TEXT] [--out docs/compare.svg]

The picture runs in real time, from the first key of the prompt to the verdict on the race. It contains the figures that
were measured meanwhile, so use an idle machine. A viewer without animation shows the end.
"""

from __future__ import annotations

import argparse
import codecs
import itertools
import os
import re
import select
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

import pyte
from pyte.screens import Char

from harness.config.installation import CONF

# The first prompt of the shipped set. Its acceptance is about the mean of the set.
PROMPT = "Paul was a shy hedgehog who lived near the village. In"
COMMAND = "harness compare temperature=0"
LAST_LINE = "The texts are identical, token for token."
COLUMNS, LINES = 80, 30
SECONDS_PER_KEY = 0.03
# Output that arrives within this time belongs to one frame.
SECONDS_OF_ONE_FRAME = 0.005
# Pauses before the first key, and between the end and the next beginning.
PAUSE_BEFORE_S = 0.6
PAUSE_AFTER_S = 5.0
PATIENCE_S = 300.0

# Pixels.
FONT_SIZE, CHARACTER, LINE, MARGIN = 14, 8.4, 20, 16
BACKGROUND, FOREGROUND = "#14181d", "#d5dbe1"
# pyte does not support dim text, so such text gets a colour.
DIM, DIM_COLOUR = "\x1b[2m", "\x1b[38;2;139;148;158m"


class Piece(NamedTuple):
    """Adjacent characters on a line that have one style.

    Attributes:
        line, column: the position of the first character.
        style: the style as attributes of an SVG element.
    """

    line: int
    column: int
    text: str
    style: str


class Frame(NamedTuple):
    """The content of the screen from the time `at` on, in seconds."""

    at: float
    pieces: frozenset[Piece]


class Recording:
    """A terminal in which `compare` runs, and the frames that it has shown."""

    def __init__(self, directory: Path) -> None:
        self.frames: list[Frame] = []
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.Stream(self._screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        environment |= {"COLUMNS": str(COLUMNS), "LINES": str(LINES)}
        self._keyboard, inside = os.openpty()
        termios.tcsetwinsize(inside, (LINES, COLUMNS))
        # Like a real terminal, answer a request for the cursor's position.
        self._screen.write_process_input = self.type
        # The files of the run are not needed.
        settings = ["results.file=null", f"hydra.run.dir={directory}"]
        command = [sys.executable, "-m", *COMMAND.split(), *settings]
        self._process = subprocess.Popen(
            command, env=environment, stdin=inside, stdout=inside, stderr=inside
        )
        os.close(inside)

    def type(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def wait_for(self, expected: str) -> None:
        """Record until this text is on the screen.

        Raises:
            AssertionError: it is not there after PATIENCE_S seconds.
        """
        deadline = time.monotonic() + PATIENCE_S
        while expected not in "\n".join(self._screen.display):
            assert time.monotonic() < deadline, "\n".join(self._screen.display)
            self.record(1.0)

    def record(self, seconds: float) -> None:
        """Record one frame; no frame if there is no output within this time."""
        patience = seconds
        printed = b""
        while select.select([self._keyboard], [], [], patience)[0]:
            printed += os.read(self._keyboard, 65536)
            patience = SECONDS_OF_ONE_FRAME
        if printed:
            self._stream.feed(self._decoder.decode(printed).replace(DIM, DIM_COLOUR))
            self.frames.append(Frame(time.monotonic(), frozenset(self._pieces())))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._keyboard)

    def _pieces(self) -> Iterator[Piece]:
        """The content of the screen, without the lines after the verdict, where the next prompt appears."""
        for line, text in enumerate(self._screen.display):
            cells = self._screen.buffer[line]
            start = 0
            styles = (_style(cells[column]) for column in range(len(text.rstrip())))
            for style, run in itertools.groupby(styles):
                end = start + len(list(run))
                # Words that are far apart become separate pieces, because the lanes change at different times.
                for word in re.finditer(r"\S+(?: {1,2}\S+)*", text[start:end]):
                    yield Piece(line, start + word.start(), word.group(), style)
                start = end
            if LAST_LINE in text:
                return


def _style(cell: Char) -> str:
    attributes = ""
    if re.fullmatch("[0-9a-f]{6}", cell.fg):
        attributes += f' fill="#{cell.fg}"'
    if cell.bold:
        attributes += ' font-weight="bold"'
    if cell.underscore:
        attributes += ' text-decoration="underline"'
    return attributes


def record(prompt: str) -> list[Frame]:
    """The frames of a race. The first one, at 0 s, shows the terminal before the prompt; the last one the verdict."""
    with tempfile.TemporaryDirectory() as directory:
        recording = Recording(Path(directory))
        try:
            recording.wait_for("Ctrl-D ends.")
            # Wait until `>` is drawn, because keys are read only then.
            recording.wait_for("\n> ")
            recording.record(1.0)
            first = recording.frames[-1]
            began = time.monotonic() - PAUSE_BEFORE_S
            recording.frames.clear()
            for key in f"{prompt}\r":
                recording.type(key)
                due = time.monotonic() + SECONDS_PER_KEY
                while (left := due - time.monotonic()) > 0:
                    recording.record(left)
            recording.wait_for(LAST_LINE)
        finally:
            recording.close()
    frames = [Frame(frame.at - began, frame.pieces) for frame in recording.frames]
    return [Frame(0.0, first.pieces), *frames]


def as_svg(frames: list[Frame]) -> str:
    """The frames as an SVG picture that is animated by CSS only: each piece is visible while it is on the screen."""
    length = frames[-1].at + PAUSE_AFTER_S
    ends = [frame.at for frame in frames[1:]] + [length]
    seen: dict[Piece, list[tuple[float, float]]] = {}
    for frame, end in zip(frames, ends, strict=True):
        for piece in frame.pieces:
            spans = seen.setdefault(piece, [])
            if spans and spans[-1][1] == frame.at:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((frame.at, end))

    names: dict[str, str] = {}
    texts = []
    for piece in sorted(seen):
        attributes = piece.style
        if seen[piece] != [(0.0, length)]:
            steps = {0.0: "hidden"}
            for start, end in seen[piece]:
                steps |= {start: "visible", end: "hidden"}
            keyframes = "".join(
                f"{at / length:.2%}{{visibility:{step}}}"
                for at, step in steps.items()
                if at < length
            )
            name = names.setdefault(keyframes, f"f{len(names)}")
            attributes += f' class="{name}"'
        if piece not in frames[-1].pieces:
            attributes += ' visibility="hidden"'
        # The line with the command is above the screen.
        texts.append(_text(piece.line + 1, piece.column, piece.text, attributes))
    num_lines = 2 + max(piece.line for piece in seen)
    width = 2 * MARGIN + COLUMNS * CHARACTER
    height = 2 * MARGIN + num_lines * LINE
    moves = "".join(
        f"@keyframes {name}{{{steps}}}.{name}{{animation-name:{name}}}"
        for steps, name in names.items()
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">
<title>{COMMAND}: both decoders answer one prompt. {LAST_LINE}</title>
<style>
g{{font:{FONT_SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}}
@media (prefers-reduced-motion:no-preference){{[class]{{animation:{length:.2f}s step-end infinite}}}}
{moves}
</style>
<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>
<g fill="{FOREGROUND}">
{_text(0, 0, f"$ {COMMAND}", "")}
{"".join(texts)}
</g>
</svg>
"""


def _text(line: int, column: int, text: str, attributes: str) -> str:
    x = MARGIN + column * CHARACTER
    y = MARGIN + line * LINE + FONT_SIZE
    # `textLength` makes every font fit the grid.
    length = len(text) * CHARACTER
    return f'<text x="{x:.1f}" y="{y}" textLength="{length:.1f}"{attributes}>{escape(text, quote=False)}</text>\n'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--out", type=Path, default=CONF.parent / "docs" / "compare.svg")
    options = parser.parse_args()
    picture = as_svg(record(options.prompt))
    options.out.write_text(picture, encoding="utf-8")
    print(f"{options.out}: {len(picture.encode())} bytes")


if __name__ == "__main__":
    main()

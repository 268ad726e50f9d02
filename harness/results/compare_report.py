"""What `compare` shows, as rich renderables: texts whose tokens say who wrote them, clocks, the verdict, rejections."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from harness.results.labels import labels

# Colours of Okabe and Ito's palette, which the common kinds of colour-blindness keep apart; underline and bold tell
# the rare ones apart once more. The keys are the values of `decoding.protocols.Origin`.
_STYLES = {
    "target": Style(),
    "draft": Style(color="#009E73"),
    "recovered": Style(color="#D55E00", underline=True),
    "bonus": Style(color="#CC79A7", bold=True),
}
# Without colour: what stands before and after a token.
_MARKS = {"target": ("", ""), "draft": ("", ""), "recovered": ("[", "]"), "bonus": ("{", "}")}
_NAMES = {"draft": "accepted draft", "recovered": "recovered", "bonus": "bonus"}

# Below this width two columns of text are too narrow to read; the race then runs one above the other.
_SIDE_BY_SIDE = 60
_GUTTER = 3


@dataclass(frozen=True)
class Piece:
    """Text that became complete with one token, and the origin of that token."""

    text: str
    origin: str


@dataclass
class Lane:
    """One arm on the screen: its text and its clock so far.

    Attributes:
        origins: whether to show who wrote each token; the regular arm has one author.
        seconds_to_first_token: None until there is one.
    """

    name: str
    origins: bool
    pieces: list[Piece] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0
    seconds_to_first_token: float | None = None


def marks_instead_of_colours(console: Console) -> bool:
    """Whether who wrote a token must be readable without colour: NO_COLOR, a pipe, a terminal that has none."""
    return console.no_color or console.color_system is None


def plain_console(**arguments: Any) -> Console:
    """A console on stdout that never rewrites the model's text: no markup, no emoji codes, no highlighting."""
    # Rich takes a NO_COLOR that is set but empty for a wish; https://no-color.org asks for one that is not empty.
    no_color = bool(os.environ.get("NO_COLOR"))
    return Console(highlight=False, markup=False, emoji=False, no_color=no_color, **arguments)


def legend(marks: bool) -> Text:
    """What the colours or marks mean."""
    parts: list[Text] = []
    for origin, name in _NAMES.items():
        parts.append(_token(name, origin, marks))
        parts.append(Text(" · ", style="dim"))
    return Text.assemble(*parts[:-1])


def text_of(lane: Lane, marks: bool) -> Text:
    """The lane's text, every token as its origin asks."""
    return Text.assemble(
        *(_token(piece.text, piece.origin if lane.origins else "target", marks) for piece in lane.pieces)
    )


def clock(lane: Lane) -> Text:
    """The lane's figures: tokens, tokens/s, time to first token, seconds."""
    parts = [f"{lane.num_tokens} token{'' if lane.num_tokens == 1 else 's'}", f"{lane.seconds:.2f} s"]
    if lane.num_tokens and lane.seconds:
        parts.append(f"{lane.num_tokens / lane.seconds:.1f} tokens/s")
    if lane.seconds_to_first_token is not None:
        parts.append(f"first token {1000 * lane.seconds_to_first_token:.1f} ms")
    return Text(" · ".join(parts), style="dim")


def running(lane: Lane, width: int, height: int, marks: bool, console: Console) -> RenderableType:
    """A lane that is still growing, its newest lines, in at most `height` lines and `width` columns."""
    around = [_heading(lane, marks), clock(lane)]
    return Group(around[0], _newest(lane, width, height - _height(around, width, console), marks, console), around[1])


def finished(lane: Lane, marks: bool) -> RenderableType:
    """A whole lane."""
    text = text_of(lane, marks)
    text.rstrip()
    return Group(_heading(lane, marks), text, clock(lane))


def side_by_side(lanes: Sequence[Lane], width: int, height: int, marks: bool, console: Console) -> RenderableType:
    """Lanes that may be growing, beside each other, or one above the other where that would be too narrow."""
    if width < _SIDE_BY_SIDE or len(lanes) == 1:
        share = (height - 1) // len(lanes)
        return Group(*(running(lane, width, share, marks, console) for lane in lanes))
    column = (width - _GUTTER * (len(lanes) - 1)) // len(lanes)
    clocks = [clock(lane) for lane in lanes]
    # One line each for the legend, the names and the cursor.
    height -= 3 + max(_height([text], column, console) for text in clocks)
    table = Table.grid(padding=(0, _GUTTER, 0, 0))
    for _ in lanes:
        table.add_column(width=column)
    table.add_row(*(Text(lane.name, style="bold") for lane in lanes))
    table.add_row(*(_newest(lane, column, height, marks, console) for lane in lanes))
    table.add_row(*clocks)
    return Group(legend(marks), table)


def verdict(row: Mapping[str, Any]) -> list[Text]:
    """Speed-up, acceptance, and whether the texts are the same, from the row of a race."""
    made_up = [
        Text(f"{label}: acceptance and texts say nothing about the pair", style="yellow") for label in labels(row)
    ]
    if row["speedup"] is None:
        return made_up
    speedup = row["speedup"]
    pays = f"{speedup:.2f}× faster" if speedup >= 1 else f"{speedup:.2f}×: slower than regular decoding"
    accepted = "nothing was drafted"
    if row["acceptance_rate"] is not None:
        accepted = (
            f"{row['acceptance_rate']:.0%} of the draft tokens accepted, "
            f"{row['mean_acceptance_length']:.2f} tokens an iteration"
        )
    lines = [Text.assemble((pays, "bold"), f" · {accepted}"), Text(_identity(row), style="dim")]
    if row["lenience"] < 1:
        lines.append(
            Text(
                f"lenience {row['lenience']:g}: the speculative text no longer follows the target (lossy)",
                style="yellow",
            )
        )
    return lines + made_up


def rejections(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Every rejection: position, rejected token, its probabilities under both models, what replaced it."""
    if not rows:
        return Text("No draft token was rejected.", style="dim")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, justify in (("at", "right"), ("rejected", "left"), ("target", "right"), ("draft", "right")):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    table.add_column("replaced by", overflow="fold")
    for row in rows:
        table.add_row(
            str(row["position"]),
            Text(_visible(row["rejected"])),
            f"{row['target_probability']:.3f}",
            f"{row['draft_probability']:.3f}",
            Text(_visible(row["replacement"])),
        )
    caption = "at: place in the new text, from 0 · target, draft: the rejected token's probability under each model"
    return Group(table, Text(caption, style="dim"))


def screen_text(text: str) -> str:
    """Text without what would steer the terminal: control characters become their pictures (ESC becomes ␛)."""
    return "".join(
        chr(0x2400 + ord(character))
        if ord(character) < 32 and character not in "\n\t"
        # The delete character, and the controls that begin sequences on some terminals.
        else "␡"
        if 127 <= ord(character) < 160
        else character
        for character in text.replace("\r\n", "\n")
    )


def _height(texts: Sequence[Text], width: int, console: Console) -> int:
    return sum(len(text.wrap(console, width)) for text in texts)


def _newest(lane: Lane, width: int, height: int, marks: bool, console: Console) -> RenderableType:
    """The last lines of the lane's text."""
    return Group(*text_of(lane, marks).wrap(console, width)[-max(1, height) :])


def _heading(lane: Lane, marks: bool) -> Text:
    name = Text(lane.name, style="bold")
    return Text.assemble(name, "  ", legend(marks)) if lane.origins else name


def _token(text: str, origin: str, marks: bool) -> Text:
    """A token as its origin asks. The space around a word stays outside, so that words stay apart."""
    text = screen_text(text)
    body = text.strip()
    start = text.index(body)
    lead, tail = text[:start], text[start + len(body) :]
    if not marks:
        return Text.assemble(lead, (body, _STYLES[origin]), tail)
    before, after = _MARKS[origin]
    if before and not body:
        # A token of nothing but space is named.
        body, lead, tail = "⏎" if "\n" in text else "␣", "", text
    return Text(f"{lead}{before}{body}{after}{tail}")


def _visible(token: str) -> str:
    """A token in a table: quoted, so that its spaces show."""
    return f'"{screen_text(token)}"'.replace("\n", "⏎").replace("\t", "⇥")


def _identity(row: Mapping[str, Any]) -> str:
    if row["identical"]:
        return "The texts are identical, token for token."
    place = f"The texts part at token {row['parted_at']}"
    if row["lossy"]:
        return f"{place}."
    if row["temperature"] > 0:
        return f"{place}; sampled texts may, both follow the target's distribution."
    return (
        f"{place}, where the logits differ by {row['logit_margin']:.2g} "
        "(near 0: a tie that rounding broke differently)."
    )

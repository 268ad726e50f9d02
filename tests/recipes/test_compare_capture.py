"""The README's moving picture: each piece of the terminal is visible while it was on the screen."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from recipes.compare_capture import LAST_LINE, PAUSE_AFTER_S, Frame, Piece, as_svg

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).parents[2] / "docs"


def texts(picture: str) -> dict[str, ElementTree.Element]:
    return {text.text or "": text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")}


def test_each_piece_is_visible_while_it_is_on_the_screen() -> None:
    stays = Piece(0, 0, "<stays>", "")
    grows = [Piece(1, 0, text, "") for text in ("one", "one two")]
    last = Piece(2, 40, "last", ' fill="#009e73"')
    frames = [
        Frame(0.0, frozenset({stays, grows[0]})),
        Frame(1.0, frozenset({stays, grows[1]})),
        Frame(3.0, frozenset({stays, grows[1]})),
        Frame(4.0, frozenset({stays, grows[0], last})),
    ]
    picture = as_svg(frames)
    seconds = 4.0 + PAUSE_AFTER_S

    def steps(text: Piece) -> str:
        name = texts(picture)[text.text].get("class")
        return picture.partition(f"@keyframes {name}{{")[2].partition("}}")[0] + "}"

    assert f"animation:{seconds:.2f}s step-end infinite" in picture
    assert texts(picture)["<stays>"].get("class") is None
    assert steps(grows[0]) == (
        f"0.00%{{visibility:visible}}{1 / seconds:.2%}{{visibility:hidden}}"
        f"{4 / seconds:.2%}{{visibility:visible}}"
    )
    assert steps(grows[1]) == (
        f"0.00%{{visibility:hidden}}{1 / seconds:.2%}{{visibility:visible}}"
        f"{4 / seconds:.2%}{{visibility:hidden}}"
    )
    # Where nothing moves, the end is shown.
    hidden = {name for name, text in texts(picture).items() if text.get("visibility") == "hidden"}
    assert hidden == {"one two"}
    assert texts(picture)["last"].get("fill") == "#009e73"


def test_the_picture_in_the_docs_ends_with_identical_texts() -> None:
    picture = (DOCS / "compare.svg").read_text(encoding="utf-8")
    assert len(picture.encode()) < 100_000
    assert "step-end infinite" in picture
    shown = [text for text in texts(picture).values() if text.get("visibility") is None]
    lowest = max(shown, key=lambda text: float(text.get("y", "")))
    assert lowest.text == LAST_LINE

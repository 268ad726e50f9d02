"""An answer gets tokens in bursts: its text, where it ends, and what is missing of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.settings import DecodingSettings
from harness.engines.door.serving import Piece, TokenLogprob
from harness.engines.protocol import Request
from harness.local.serving.answers import Answer

END_OF_TEXT = 3


class Letters:
    """A token is a letter; the one that ends a text gives none."""

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        return "".join(chr(token) for token in tokens if token != END_OF_TEXT)


def answer(most: int = 100, **fields: Any) -> Answer:
    decoding = DecodingSettings(max_new_tokens=most)
    request = Request(ids("prompt"), decoding, 7, 0, frozenset([END_OF_TEXT]))
    tokenizer: Any = Letters()
    arm: Any = SimpleNamespace()
    return Answer(arm, request, tokenizer, lambda piece: None, **fields)


def ids(text: str) -> list[int]:
    return list(map(ord, text))


def texts(pieces: Sequence[Piece]) -> list[str]:
    return [piece.text for piece in pieces]


@pytest.mark.parametrize(
    ("bursts", "shown"),
    [
        pytest.param(["the E", "ND of"], ["the ", ""], id="in two bursts"),
        pytest.param(["the E", "N", "Ds"], ["the ", "", ""], id="in three"),
        pytest.param(["a", "END"], ["a", ""], id="in one burst"),
        pytest.param(["no EN, but END"], ["no EN, but "], id="after its own beginning"),
        pytest.param(["EEN", "D"], ["E", ""], id="behind a false beginning"),
        pytest.param(["of STOP, END"], ["of "], id="the first of two"),
    ],
)
def test_a_stop_text_ends_the_answer_and_is_never_shown(
    bursts: list[str], shown: list[str]
) -> None:
    growing = answer(stops=["END", "STOP"])
    pieces = [growing.take(ids(burst), 0, 0) for burst in bursts]
    assert texts(pieces) == shown
    assert [piece.finish_reason for piece in pieces] == [*[None] * len(bursts[1:]), "stop"]


def test_what_only_began_like_a_stop_text_is_shown() -> None:
    growing = answer(most=6, stops=["END"])
    pieces = [growing.take(ids(burst), 0, 0) for burst in ("aE", "Nb", "EN")]
    assert texts(pieces) == ["a", "ENb", "EN"]
    assert pieces[-1].finish_reason == "length"


def test_a_stop_token_ends_it_before_its_length_does() -> None:
    piece = answer(most=3).take([*ids("ab"), END_OF_TEXT], 0, 0)
    assert piece == Piece(0, "ab", [*ids("ab"), END_OF_TEXT], "stop", [])


def test_scored_tokens_begin_where_their_text_does() -> None:
    """Counted from the beginning of the answer, in bursts of which only some tokens are scored."""
    growing = answer(choice=2)
    pieces = [growing.take(ids("abc"), 0, 0)]
    logprobs = [TokenLogprob(place, ord("x"), -1.0, 1, []) for place in (0, 2)]
    pieces.append(growing.take(ids("xyx"), 0, 0, logprobs))
    assert [scored.offset for scored in pieces[1].scored] == [3, 5]
    assert [scored.logprob for scored in pieces[1].scored] == logprobs
    assert {piece.choice for piece in pieces} == {2}
    assert texts(pieces) == ["abc", "xyx"], "nothing is held back without stop texts"


def test_outcomes_are_of_iterations_that_drafted() -> None:
    growing = answer()
    assert growing.seconds_to_first_token is None
    growing.take(ids("a"), 0, 0)
    growing.take(ids("b"), 4, 0)
    growing.take(ids("bc"), 4, 1)
    # All of the draft's tokens that the text has: it ends within them.
    growing.take(ids("de"), 4, 3)
    assert growing.outcomes == [(4, 0), (4, 1), (1, 1)]
    assert growing.seconds_to_first_token is not None

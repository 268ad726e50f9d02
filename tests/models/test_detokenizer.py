"""Text that grows token by token says what the whole text says, and never half a character."""

from __future__ import annotations

import pytest

from harness.models.detokenizer import Detokenizer
from tiny_checkpoints import make_tokenizer

TEXT = "naïve 漢字 👩\u200d🚀 שלום\n end"


@pytest.mark.parametrize("prompt", ["a prompt", "漢字", ""])
def test_pieces_add_up_to_the_text(prompt: str) -> None:
    tokenizer = make_tokenizer()
    detokenizer = Detokenizer(tokenizer, tokenizer(prompt)["input_ids"])
    pieces = [detokenizer.add(token) for token in tokenizer(TEXT)["input_ids"]]
    assert "".join(piece or "" for piece in pieces) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in (piece or "") for piece in pieces)
    # One token is a byte here: 漢 has three and is there with the last.
    at = TEXT.encode().index("漢".encode())
    assert pieces[at : at + 3] == [None, None, "漢"]


def test_half_a_character_is_shown_when_nothing_follows() -> None:
    tokenizer = make_tokenizer()
    detokenizer = Detokenizer(tokenizer, [])
    first, second, _ = tokenizer("漢")["input_ids"]
    assert detokenizer.add(first) is None
    assert detokenizer.add(second) is None
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.flush() == ""


def test_bytes_that_never_become_a_character_do_not_wait_for_ever() -> None:
    tokenizer = make_tokenizer()
    detokenizer = Detokenizer(tokenizer, [])
    continuation = tokenizer("漢")["input_ids"][1]
    pieces = [detokenizer.add(continuation) for _ in range(8)]
    assert "".join(piece or "" for piece in pieces) == 8 * "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_give_no_text() -> None:
    tokenizer = make_tokenizer()
    detokenizer = Detokenizer(tokenizer, tokenizer("a")["input_ids"])
    assert detokenizer.add(tokenizer.eos_token_id) == ""

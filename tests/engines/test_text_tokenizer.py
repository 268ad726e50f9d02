"""The stand-in for a tokenizer that only the server has."""

from __future__ import annotations

import pytest

from harness.engines.text_tokenizer import TextTokenizer


@pytest.mark.parametrize("text", ["", "a", "Once upon a time", "\0\0", "für 3 €, 你好 🙂"])
def test_text_comes_back(text: str) -> None:
    tokenizer = TextTokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == -(-len(text.encode()) // 4)


def test_ids_of_a_server_are_no_error() -> None:
    assert TextTokenizer().decode([0, 7, 151_643]) is not None


def test_several_texts_have_ids_each() -> None:
    tokenizer = TextTokenizer()
    assert tokenizer(["a", "b"])["input_ids"] == [tokenizer.encode("a"), tokenizer.encode("b")]

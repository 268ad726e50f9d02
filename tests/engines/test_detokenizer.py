"""Text that grows token by token says what the whole text says; and the stand-in for a tokenizer of a server."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from harness.engines.detokenizer import Detokenizer
from harness.engines.tokenizer import TextTokenizer, prompt_text
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


def test_special_tokens_give_no_text() -> None:
    tokenizer = make_tokenizer()
    detokenizer = Detokenizer(tokenizer, tokenizer("a")["input_ids"])
    assert detokenizer.add(tokenizer.eos_token_id) == ""


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 1 and 2 have it: characters that it lacks become tokens of single bytes."""
    names = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "b"]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("prompt", ["ab", "龘龗", "a龘龗龖", "👩👩👩"])
def test_characters_of_single_bytes_stay_whole_in_a_row(
    byte_fallback: PreTrainedTokenizerFast, prompt: str
) -> None:
    text = "龘龗龖龕龔龓a👨\u200d👩\u200d👧\u200d👦b"
    detokenizer = Detokenizer(byte_fallback, byte_fallback(prompt)["input_ids"])
    pieces = [detokenizer.add(token) for token in byte_fallback(text)["input_ids"]]
    assert "".join(piece or "" for piece in pieces) == text


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


def test_the_text_of_a_prompt_keeps_its_spaces() -> None:
    """Tokenizers such as Llama 3's ask transformers to take some of them out."""
    tokenizer = make_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    text = "it is n't , is it ?"
    assert prompt_text(tokenizer, tokenizer(text)["input_ids"]) == text

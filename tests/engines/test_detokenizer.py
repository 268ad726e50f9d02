"""Text that grows token by token says what the whole text says, and never half a character."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from harness.engines.detokenizer import Detokenizer
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
    pieces = [detokenizer.add(continuation) for _ in range(14)]
    assert "".join(piece or "" for piece in pieces) == 14 * "\N{REPLACEMENT CHARACTER}"


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


def test_a_fourth_token_may_begin_the_next_character() -> None:
    model_of_bytes = make_tokenizer()
    letters = [
        model_of_bytes.convert_ids_to_tokens(token) for token in _ids(model_of_bytes, "👩字")
    ]
    # One token for the last byte of the first character and the first of the second.
    names = [*letters[:3], letters[3] + letters[4], *letters[5:]]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    detokenizer = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [])
    pieces = [detokenizer.add(vocabulary[name]) for name in names]
    assert pieces == [*[None] * (len(names) - 1), "👩字"]


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])

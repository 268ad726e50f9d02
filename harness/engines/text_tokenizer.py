"""Stands in for a tokenizer where only servers have one: they get prompts as text, and count tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.engines.requests import RequestRecord
from harness.engines.tokenizer import Tokenizer

# As much text as a token holds on average, so that lengths of prompts are about right.
_BYTES = 4
# Before the bytes in an id, so that leading zeros stay.
_MARK = b"\1"


class TextTokenizer:
    """Carries text through code that expects ids: an id holds four bytes. No server is sent one."""

    bos_token_id = None
    eos_token_id = None
    chat_template = None

    def __call__(self, text: str | Sequence[str], **options: Any) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": self.encode(text)}
        return {"input_ids": [self.encode(part) for part in text]}

    def encode(self, text: str, **options: Any) -> list[int]:
        data = text.encode()
        parts = [data[start : start + _BYTES] for start in range(0, len(data), _BYTES)]
        return [int.from_bytes(_MARK + part) for part in parts]

    def __len__(self) -> int:
        return 2 << 8 * _BYTES  # the mark is one bit more

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        parts = [number.to_bytes(_BYTES + 1).lstrip(b"\0") for number in ids]
        return b"".join(part.removeprefix(_MARK) for part in parts).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.decode([token])


def text_of(request: RequestRecord, tokenizer: Tokenizer, **options: Any) -> str:
    """The text of an answer; `options` are those of the tokenizer's `decode`."""
    if isinstance(tokenizer, TextTokenizer):
        return request.text
    return str(tokenizer.decode(request.token_ids, **options))

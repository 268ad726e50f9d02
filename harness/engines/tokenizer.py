"""The part of a tokenizer that the instrument uses: transformers' have it, and so has `TextTokenizer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Turns text into token ids and back. `options` are those of transformers.

    Attributes:
        bos_token_id, eos_token_id: the tokens that begin and end a text; None without one.
        chat_template: None without one.
    """

    bos_token_id: Any
    eos_token_id: Any
    chat_template: Any

    def __call__(self, text: Any, **options: Any) -> Any:
        """Token ids under `input_ids`, of a text or of each of several."""

    def encode(self, text: Any, **options: Any) -> list[int]:
        """The token ids of a text."""
        ...

    @property
    def decode(self) -> Callable[..., Any]:
        """The text of token ids, or of one."""

    @property
    def convert_ids_to_tokens(self) -> Callable[..., Any]:
        """A token as the vocabulary writes it."""

    def __len__(self) -> int:
        """The number of tokens."""
        ...

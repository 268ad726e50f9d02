"""From tokens to text while it is generated: half a character waits for the other half."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# A character has at most four bytes, so at most four tokens hold it; if it is still broken then, it
# will never be whole.
_LONGEST_WAIT = 4
# Enough of the prompt that the first new token gets its leading space, and no more than must be
# decoded each time.
_CONTEXT = 4
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text that follows a prompt, as it grows.

    Each token is decoded behind a few of its predecessors, because a tokenizer may write a token
    differently at the start of a text. Special tokens give no text.

    Args:
        prompt: token ids of the prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt[-_CONTEXT:])
        self._pending: list[int] = []

    def add(self, token: int) -> str | None:
        """The text that `token` completes, maybe empty; None while a character is incomplete."""
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(_BROKEN) and len(self._pending) < _LONGEST_WAIT:
            return None
        self._advance()
        return text

    def flush(self) -> str:
        """Return the rest when the text ends, with its broken character."""
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode([*self._context, *self._pending])[len(before) :]

    def _advance(self) -> None:
        self._context = [*self._context, *self._pending][-2 * _CONTEXT :]
        self._pending = []

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

"""The part of a tokenizer that the instrument uses: transformers' have it, and so has `TextTokenizer`; prompts as
the text that servers get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def prompt_text(
    tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = False
) -> str:
    """A prompt as text for a server, whose own tokenizer adds the first token."""
    ids = prompt[1:] if prompt[0] == tokenizer.bos_token_id else prompt
    options = {
        "skip_special_tokens": skip_special_tokens,
        # Some tokenizers, such as Llama 3's, would take spaces out.
        "clean_up_tokenization_spaces": False,
    }
    return str(tokenizer.decode(list(ids), **options))


def tokens_as_served(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The tokens that a server reads where it gets a prompt as text."""
    return list(tokenizer(prompt_text(tokenizer, prompt))["input_ids"])


def tokens_behind(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text that follows another: by itself it may begin with a space that the tokenizer adds."""
    line_break = list(tokenizer("\n", add_special_tokens=False)["input_ids"])
    token_ids = list(tokenizer("\n" + text, add_special_tokens=False)["input_ids"])
    if token_ids[: len(line_break)] == line_break:
        return token_ids[len(line_break) :]
    # A token has the line break and some of the text.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])

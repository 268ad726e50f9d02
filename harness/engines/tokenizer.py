"""The part of a tokenizer that the instrument uses, its stand-in for servers, and prompts as the text that servers get.

The tokenizers of transformers have this interface. So has `TextTokenizer`, which is used if only the server has the
real tokenizer. A `ServedPair` has nothing but a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from harness.engines.requests import RequestRecord

if TYPE_CHECKING:
    from harness.local.engine.pair import PlannedPair

# The bytes of text that one id of `TextTokenizer` holds: about as many as a real token, so that prompts have about the
# right length.
_BYTES = 4
# Precedes the bytes in an id, so that leading zeros are kept.
_MARK = b"\1"


class Tokenizer(Protocol):
    """Turns text into token ids and back. `options` are those of transformers.

    Attributes:
        bos_token_id, eos_token_id: the tokens that begin and end a text; None if there is none.
        chat_template: the template for conversations; None if there is none.
    """

    bos_token_id: Any
    eos_token_id: Any
    chat_template: Any

    def __call__(self, text: Any, **options: Any) -> Any:
        """Return the token ids under the key `input_ids`, of one text or of each of several."""

    def encode(self, text: Any, **options: Any) -> list[int]:
        """Return the token ids of a text."""
        ...

    @property
    def decode(self) -> Callable[..., Any]:
        """The function that returns the text of a list of token ids, or of a single id."""

    @property
    def convert_ids_to_tokens(self) -> Callable[..., Any]:
        """The function that returns a token as the vocabulary writes it."""

    def __len__(self) -> int:
        """The number of tokens in the vocabulary."""
        ...


class TextTokenizer:
    """Carries text through code that expects token ids: each id holds four bytes of it. Such ids are sent to no
    server.
    """

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


@dataclass(frozen=True)
class ServedPair:
    """The pair of an engine in another process. Only its tokenizer is here; the limits of its models are unknown."""

    tokenizer: Tokenizer

    def room(self, new_tokens: int) -> None:
        return None

    def excess(self, longest: int, new_tokens: int, answers: str | None = None) -> None:
        return None

    def check_vocabulary(self, token_ids: Sequence[Sequence[int]]) -> None:
        pass


# The pair whose tokenizer encodes prompts.
AnyPair: TypeAlias = "PlannedPair | ServedPair"


def text_of(request: RequestRecord, tokenizer: Tokenizer, **options: Any) -> str:
    """Return the text of an answer; `options` are passed to the tokenizer's `decode`."""
    if isinstance(tokenizer, TextTokenizer):
        return request.text
    return str(tokenizer.decode(request.token_ids, **options))


def prompt_text(
    tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = False
) -> str:
    """Return a prompt as text for a server, without the token that begins a text, which the server's tokenizer adds."""
    ids = prompt[1:] if prompt[0] == tokenizer.bos_token_id else prompt
    options = {
        "skip_special_tokens": skip_special_tokens,
        # Some tokenizers, such as Llama 3's, would take spaces out.
        "clean_up_tokenization_spaces": False,
    }
    return str(tokenizer.decode(list(ids), **options))


def tokens_as_served(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Return the tokens that a server reads if it gets the prompt as text."""
    return list(tokenizer(prompt_text(tokenizer, prompt))["input_ids"])


def tokens_behind(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text that follows another one.

    The text is encoded after a line break, because some tokenizers add a space in front of a text that stands alone.
    """
    line_break = list(tokenizer("\n", add_special_tokens=False)["input_ids"])
    token_ids = list(tokenizer("\n" + text, add_special_tokens=False)["input_ids"])
    if token_ids[: len(line_break)] == line_break:
        return token_ids[len(line_break) :]
    # One token holds the line break together with the beginning of the text, so the two cannot be separated.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])

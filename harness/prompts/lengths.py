"""Natural text of given lengths, for measurements over the length of the context."""

from __future__ import annotations

from collections.abc import Sequence

from harness.config.errors import SettingError

# More characters than tokens of natural text have, so that a text has enough tokens in any language
# and vocabulary.
_CHARACTERS_PER_TOKEN = 12


def of_lengths(documents: Sequence[str], lengths: Sequence[int]) -> list[tuple[str, int]]:
    """For each document a text that begins with it, and the tokens to which it is to be cut.

    Lengths are dealt out in turn: with lengths 512 and 4096, documents 0, 2, 4, ... begin texts of
    512 tokens. A text goes on with the documents that follow, the first ones after the last, and
    has none twice: repeated text would be easy to predict.

    Raises:
        SettingError: the documents together are too short.
    """
    available = sum(map(len, documents))
    longest = max(lengths)
    if available < _CHARACTERS_PER_TOKEN * longest:
        most = available // _CHARACTERS_PER_TOKEN
        rule = f"the texts of this set are enough for {most:,} tokens"
        raise SettingError("prompts.lengths", rule, longest)
    return [
        (_text(documents, first, lengths[first % len(lengths)]), lengths[first % len(lengths)])
        for first in range(len(documents))
    ]


def _text(documents: Sequence[str], first: int, num_tokens: int) -> str:
    parts: list[str] = []
    num_characters = 0
    for document in [*documents[first:], *documents[:first]]:
        if num_characters >= _CHARACTERS_PER_TOKEN * num_tokens:
            break
        parts.append(document)
        num_characters += len(document)
    return "\n\n".join(parts)[: _CHARACTERS_PER_TOKEN * num_tokens]
